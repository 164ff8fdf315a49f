"""Prompt lookup decoding: the greedy continuation of a text in fewer forward passes.

The tokens that followed an earlier occurrence of the last few tokens are proposed as the next
tokens (names in code, or words in a summary, repeat). One forward pass verifies all proposals in
hardly more time than a single token; tokens that differ from greedy decoding are dropped. In
bfloat16 several tokens are rounded differently from one, so a near tie may be decided differently.
"""

import torch

from model.core.generate import NON_FINITE_LOGITS, eager_mode
from model.core.kv_cache import create_cache

MAX_PROPOSALS = {4: 15, 2: 4, 1: 2}  # proposed tokens, by the number of matching tokens


class TokenHistory:
    """The tokens of a text, and the last position after each n-gram."""

    def __init__(self, tokens):
        self.tokens, self.positions = [], {}
        for token in tokens:
            self.add(token)

    def add(self, token):
        end = len(self.tokens)
        self.positions |= {tuple(self.tokens[end - n:]): end for n in MAX_PROPOSALS if end >= n}
        self.tokens.append(token)

    def propose(self, limit):
        """Return up to `limit` tokens that may follow; a short match is repeated."""
        for n, n_proposed in MAX_PROPOSALS.items():
            position = self.positions.get(tuple(self.tokens[-n:]))
            if position is not None:
                known = self.tokens[position:]
                return [known[i % len(known)] for i in range(min(limit, n_proposed))]
        return []


@torch.no_grad()
def generate_with_lookup(model, idx, max_new_tokens, stop_token=None, on_token=None, n_vocab=None):
    """Return (the result of generate() with temperature 0 for one text idx (1, T) int64, number of
    forward passes). Raises ValueError if the logits are not finite."""
    c = model.config
    cache = create_cache(model, 1)
    history = TokenHistory(idx[0].tolist())
    pending, end, passes = history.tokens[-c.block_size:], idx.size(1) + max_new_tokens, 0
    with eager_mode(model):
        while len(history.tokens) < end and (not passes or history.tokens[-1] != stop_token):
            if not c.rolls and cache.lengths[0] + len(pending) > c.block_size:
                cache.clear()
                pending = history.tokens[-max(1, c.block_size * 3 // 4):]
            limit = min(c.block_size - int(cache.lengths[0]), end - len(history.tokens)) - 1
            # No proposals together with a prompt: the logits of all positions would be computed.
            proposal = history.propose(limit) if len(pending) == 1 else []
            tokens = torch.tensor([pending + proposal], device=idx.device)
            passes += 1
            logits = model(tokens, cache=cache, last_only=not proposal)
            largest, best = logits[0, -1 - len(proposal):, :n_vocab].max(-1)  # (1 + proposed,)
            if not bool(largest.isfinite().all()):
                raise ValueError(NON_FINITE_LOGITS)
            best = best.tolist()
            n = next((i for i, token in enumerate(proposal) if token != best[i]), len(proposal))
            cache.truncate(len(proposal) - n, (pending + proposal)[-1 - len(proposal) + n])
            for token in best[:n + 1]:
                history.add(token)
                if on_token is not None:
                    on_token([token])
                if token == stop_token:
                    break
            pending = history.tokens[-1:]
    return torch.tensor([history.tokens], device=idx.device), passes
