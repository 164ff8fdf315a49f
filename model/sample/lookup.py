"""Prompt lookup: the most likely text of a model, the same as without, in fewer passes.

What followed the last few tokens when they were there before is guessed to follow again, as names
do in code and words in a summary of a text; the model computes all of it at once, which takes
hardly longer than one token, and what it would not have written itself is dropped. In bfloat16
several tokens are rounded otherwise than one: of two that are as likely, the other may be written.
"""

import torch

from model.core.generate import NOT_FINITE, empty_cache, past_compiled

GUESSED = {4: 15, 2: 4, 1: 2}  # tokens at once, for so many that were there before


class Past:
    """A text as tokens, and where each of its short stretches ended last, before the end."""

    def __init__(self, tokens):
        self.tokens, self.after = [], {}
        for token in tokens:
            self.add(token)

    def add(self, token):
        here = len(self.tokens)
        self.after |= {tuple(self.tokens[here - n:]): here for n in GUESSED if here >= n}
        self.tokens.append(token)

    def guess(self, most):
        """Up to `most` tokens that may follow: what is known of them, over and over."""
        for n, guessed in GUESSED.items():
            at = self.after.get(tuple(self.tokens[-n:]))
            if at is not None:
                known = self.tokens[at:]
                return [known[i % len(known)] for i in range(min(most, guessed))]
        return []


@torch.no_grad()
def look_up(model, idx, max_new_tokens, stop_token=None, on_token=None, n_vocab=None):
    """(what model.generate.generate makes at temperature 0 of one text, idx (1, T) int64; passes
    that it took). ValueError where the logits are not finite."""
    c, cache, past = model.config, empty_cache(model, 1), Past(idx[0].tolist())
    pending, end, passes = past.tokens[-c.block_size:], idx.size(1) + max_new_tokens, 0
    with past_compiled(model):
        while len(past.tokens) < end and (not passes or past.tokens[-1] != stop_token):
            if not c.rolls and cache.used[0] + len(pending) > c.block_size:
                cache.clear()
                pending = past.tokens[-max(1, c.block_size * 3 // 4):]
            most = min(c.block_size - int(cache.used[0]), end - len(past.tokens)) - 1
            # Not with a prompt, all of whose logits would have to be computed.
            guess = past.guess(most) if len(pending) == 1 else []
            read, passes = torch.tensor([pending + guess], device=idx.device), passes + 1
            logits = model(read, cache=cache, last_only=not guess)[0, -1 - len(guess):, :n_vocab]
            largest, best = logits.max(-1)  # (1 + guessed,)
            if not bool(largest.isfinite().all()):
                raise ValueError(NOT_FINITE)
            best = best.tolist()
            n = next((i for i, token in enumerate(guess) if token != best[i]), len(guess))
            cache.forget(len(guess) - n, (pending + guess)[-1 - len(guess) + n])
            for token in best[:n + 1]:
                past.add(token)
                if on_token is not None:
                    on_token([token])
                if token == stop_token:
                    break
            pending = past.tokens[-1:]
    return torch.tensor([past.tokens], device=idx.device), passes
