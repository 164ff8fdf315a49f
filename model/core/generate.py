"""Autoregressive generation: continue token sequences with a model, and sample from logits."""

import contextlib
import secrets
from dataclasses import dataclass

import torch

from data.tokenizer import tokenizer_from_spec
from model.core.kv_cache import create_cache
from model.core.ops import histories
from train.base.fields import key

NON_FINITE_LOGITS = "the model's logits are not finite: no token can be sampled from them"


@dataclass
class SamplingOptions:
    """Base class of command-line options: the arguments of generate() for sampling."""
    max_new_tokens: int = key(256, "maximum number of new tokens", ge=0)
    temperature: float = key(0.0, "0: always the most likely token", ge=0)
    top_k: int | None = key(None, "sample from the K most likely tokens", ge=1, metavar="K")
    top_p: float | None = key(None, "sample from the most likely tokens with a total probability "
                              "of P", gt=0, le=1, metavar="P")
    min_p: float | None = key(None, "sample from tokens with at least P times the probability of "
                              "the most likely one", ge=0, le=1, metavar="P")
    seed: int | None = key(None, "the same seed generates the same text", ge=0, lt=2**63)

    def sampling(self):
        """Return temperature, top_k, top_p, min_p and seed as keyword arguments of generate()."""
        return {name: getattr(self, name)
                for name in ("temperature", "top_k", "top_p", "min_p", "seed")}


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None,
             stop_token=None, on_token=None, n_vocab=None, min_p=None, lengths=None,
             samples_per_row=1):
    """Continue each prompt; return ids (rows, T + new) int64 that begin with the prompts.

    model: a GPT in eval mode. idx (B, T) int64: the prompts. rows = B * samples_per_row.
    temperature: 0: always the most likely token.
    top_k, top_p, min_p, in this order: sample from the top_k most likely tokens; from the fewest
    with a total probability of at least top_p (arXiv:1904.09751); from those with at least min_p
    times the probability of the most likely one (arXiv:2407.01082). `None`: no limit.
    seed: an int, `None` (random), or a list of n of these: the rows are divided into n groups of
    equal size, and seed i alone determines the tokens of group i.
    stop_token: an id or a list of ids, after which a row is finished. A finished row is padded with
    this id; generation ends when all rows are finished.
    on_token: called with the new tokens (rows,) of each step. Generation ends if it returns true.
    n_vocab: ids from n_vocab on (padding of the vocabulary) are never sampled; `None`: no such ids.
    lengths (B,): true lengths, at least 1, of right-padded prompts (`None`: T); new tokens are in
    the columns from T on.
    samples_per_row: continuations per prompt, in consecutive rows; the prompt is computed once.

    When the context is full, the last half of it is computed again from position 0, and generation
    continues. With `lengths` the caller must ensure that T + max_new_tokens is at most block_size.
    Raises ValueError if the logits are not finite.
    """
    c = model.config
    size = min(c.block_size, idx.size(1) + max_new_tokens)
    generators = create_generators(seed, idx.device)
    stops = torch.tensor([] if stop_token is None else stop_token, device=idx.device).view(-1)
    with eager_mode(model):
        cache, pending = start_cache(model, idx, size, lengths, samples_per_row)
        idx = idx.repeat_interleave(samples_per_row, 0)  # (rows, T)
        active = torch.arange(len(idx), device=idx.device)  # numbers of the unfinished rows
        done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
        failed = done.new_zeros(())
        for _ in range(max_new_tokens):
            if cache.lengths[0] + pending.size(1) > c.block_size:
                cache.clear()
                pending = idx[active, -max(1, c.block_size // 2):]
            logits = model(pending, cache=cache, last_only=True)[:, -1, :n_vocab]  # (active, V)
            if len(active) < len(idx):  # finished rows sample too, so that the others' draws
                logits = logits.new_zeros(len(idx), logits.size(1)).index_copy(0, active, logits)
            new = sample_tokens(logits, temperature, top_k, top_p, generators, min_p)  # (rows,)
            failed |= (new < 0).any()
            if stop_token is not None:
                new = torch.where(done, idx[:, -1], new)
                done |= torch.isin(new, stops)
            idx = torch.cat((idx, new.clamp(min=0)[:, None]), dim=1)
            if on_token is not None or stop_token is not None:  # synchronises with a GPU
                n_active, any_failed = torch.stack(((~done).sum(), failed)).tolist()
                if any_failed or on_token is not None and on_token(new) or not n_active:
                    break
                cache, active = remove_rows(cache, active, done[active], n_active)
            pending = idx[active, -1:]
    if bool(failed):
        raise ValueError(NON_FINITE_LOGITS)
    return idx


def remove_rows(cache, active, is_done, n):
    """Remove finished rows from a KVCache; return (cache, active) of the n unfinished rows.

    active (rows,): index in the batch of each row of the cache; both are changed in place.
    is_done (rows,): bool. If fewer than an eighth are finished, returns both unchanged.
    """
    if 8 * n > 7 * len(active):
        return cache, active
    targets = is_done[:n].nonzero()[:, 0].tolist()
    sources = (n + (~is_done[n:]).nonzero()[:, 0]).tolist()
    cache.copy_rows(sources, targets)
    active[targets] = active[sources]
    return cache[:n], active[:n]


def create_generators(seed, device):
    """Return a torch.Generator per seed; seed: an int, `None` (random), or a list of these."""
    seeds = seed if isinstance(seed, list) else [seed]
    return [torch.Generator(device).manual_seed(secrets.randbits(63) if s is None else s)
            for s in seeds]


def start_cache(model, idx, size, lengths=None, samples_per_row=1):
    """Return (cache, pending) for prompts (B, T): a KVCache, and the ids to pass to the model next.

    size: tokens per row of the cache. lengths (B,): true lengths of right-padded prompts.
    samples_per_row: copies of each prompt, in consecutive rows.
    pending (B * samples_per_row, n): the prompts, cut to the last block_size tokens. With lengths
    or several copies, only the last tokens: the others are computed here, in one pass.
    """
    cache = create_cache(model, idx.size(0), size)
    pending = idx[:, -model.config.block_size:]
    if lengths is not None:
        ends = lengths[:, None] - 1  # (B, 1)
        pending = idx.gather(1, ends)
        if idx.size(1) > 1:
            model(idx[:, :-1], cache=cache, last_only=True)
            # The padding behind a row's end is masked from here on, and overwritten.
            cache.lengths.copy_(lengths - 1)
            cache.device_lengths.copy_(lengths - 1)
            cache.history.copy_(histories(idx).gather(1, ends))
    elif samples_per_row > 1 and pending.size(1) > 1:  # once for all copies
        model(pending[:, :-1], cache=cache, last_only=True)
        pending = pending[:, -1:]
    if samples_per_row > 1:
        cache = cache.repeat(samples_per_row)
    return cache, pending.repeat_interleave(samples_per_row, 0)


def eager_mode(model):
    """Return a context in which a compiled model runs eagerly: shapes change with each token."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def sample_tokens(logits, temperature, top_k, top_p, generators, min_p=None):
    """Return a sampled token id for each row of logits (B, V): (B,) int64.

    -1 for a row whose largest logit is not finite (an exception needs a GPU synchronisation).
    temperature, top_k, top_p, min_p: as for generate().
    generators: n torch.Generators; each is used for one of n groups of rows of equal size.
    """
    if temperature < 1e-38:  # zero in float32
        largest, index = logits.max(-1)
        return torch.where(largest.isfinite(), index, -1)
    ids = None  # (B, k): the candidates, most likely first, or None: the vocabulary
    if top_k is not None and 0 < top_k < logits.size(-1):  # 0 or less: all
        logits, ids = logits.topk(top_k)
    largest = logits.amax(-1, keepdim=True)  # NaN if any logit is
    # Subtracting the largest logit first makes the quotient finite at any temperature.
    p = ((logits - largest) / temperature).softmax(-1)
    if top_p is not None and top_p < 1.0:
        if ids is None:
            p, ids = p.sort(descending=True)
        # Keep the most likely token, and each later one before which the sum is below top_p.
        p[:, 1:][p.cumsum(-1)[:, :-1] >= top_p] = 0.0
    if min_p is not None:
        p[p < min(min_p, 1.0) * p.amax(-1, keepdim=True)] = 0.0
    index = sample_indices(p, generators)  # (B, 1)
    index = index if ids is None else ids.gather(-1, index)
    return torch.where(largest.isfinite(), index, -1)[:, 0]


def sample_indices(weights, generators):
    """Return a random index (B, 1) per row of weights (B, V), in proportion to the weights.

    If they are not finite: any index from 0 to V - 1. generators: as for sample_tokens().
    On a CPU, one uniform number per row is looked up in the cumulative sum (torch.multinomial uses
    V). On a GPU, argmax(weights / exponential random numbers) needs no check for NaN, at which
    torch.multinomial ends the CUDA context of the process.
    """
    shares = weights.chunk(len(generators))
    if weights.device.type != "cpu":
        clocks = [torch.empty_like(share).exponential_(generator=g)
                  for share, g in zip(shares, generators)]
        return (weights / torch.cat(clocks)).argmax(-1, keepdim=True)
    ends = weights.cumsum(-1, dtype=torch.float64)
    u = torch.cat([torch.rand(len(share), 1, dtype=torch.float64, generator=g)
                   for share, g in zip(shares, generators)])
    # u * total rounds to less than the total, so the selected weight is positive.
    index = torch.searchsorted(ends, u * ends[:, -1:], right=True)
    return index.clamp(max=weights.size(-1) - 1)  # out of range: NaN


def encode_prompt(tokenizer, prompt):
    """Return the list of ids for the text `prompt`, after the ids tokenizer.start; never empty.

    Instead of []: the end-of-text token, which precedes each document, or 0 without such a token.
    Raises ValueError for characters that the tokenizer does not have.
    """
    ids = tokenizer.begin(tokenizer.encode(prompt) if prompt else [])
    return ids or [tokenizer.eot_token if tokenizer.eot_token is not None else 0]


def find_ends(model, tokenizer):
    """Return the sorted ids that end a text: end of text, config.eos_ids, the chat template's."""
    template = getattr(model, "template", None)
    named = map(int, model.config.eos_ids.split(",")) if model.config.eos_ids else ()
    return sorted({tokenizer.eot_token, *named, *(template.ends if template else ())} - {None})


def sample(model, data, config):
    """Return the texts for samples.txt: each of config.sample_prompts with a continuation.

    A function of the model interface (train/system.py), for GPTs in training, in eval mode.
    config.sample_tokens is the continuation's length; config.seed makes every call use the same
    random numbers. Without prompts: one empty prompt, the beginning of a document. Without a
    tokenizer: []. The message of a ValueError, e.g. for NaN logits, is written into the text.
    If the model is sharded, all ranks must call.
    """
    if not data.spec.get("tokenizer"):
        return []
    tokenizer = tokenizer_from_spec(data.spec["tokenizer"])
    device = model.wte.weight.device
    texts = []
    for prompt in config.sample_prompts or [""]:
        try:
            idx = torch.tensor([encode_prompt(tokenizer, prompt)], device=device)
            out = generate(model, idx, config.sample_tokens, temperature=0.8, top_k=200,
                           seed=config.seed % 2**63, n_vocab=tokenizer.n_vocab)
            texts.append(prompt + tokenizer.decode(out[0, idx.size(1):].tolist()))
        except ValueError as error:  # unknown characters or NaN logits must not end the run
            texts.append(f"{prompt} [no sample: {error}]")
    return texts
