"""Text out of a checkpoint: python -m model.sample --ckpt out/ckpt.pt --prompt "Once upon"

The checkpoint holds the tokenizer, so nothing else is needed. Every token is computed once: keys
and values of the past stay in a cache.
"""

import argparse
import sys
import time

import torch

from model.gpt import GPT, GPTConfig, KVCache


def load_model(ckpt_path, device="cpu", dtype=None):
    """(model in eval mode, tokenizer or None) from a checkpoint of train.py."""
    from data.tokenizer import tokenizer_from_spec
    from train.checkpoint import CheckpointError, load_checkpoint
    from train.distributed import convert_ddp_state
    state = load_checkpoint(ckpt_path)
    known = {k: v for k, v in state.get("model_args", {}).items() if k in GPTConfig.__annotations__}
    if "n_layer" not in known:
        raise CheckpointError(f"{ckpt_path}: no model_args of a GPT in it")
    with torch.device("meta"):
        model = GPT(GPTConfig(**known))
    try:
        model.load_state_dict(convert_ddp_state(state["model"]), assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{ckpt_path}: weights do not fit model_args: {error}") from error
    spec = state.get("tokenizer")
    tokenizer = tokenizer_from_spec(spec) if spec else None
    return model.to(device, dtype).eval(), tokenizer


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None,
             stop_token=None, on_token=None):
    """Continue idx (B, T) int64 by up to max_new_tokens; returns (B, T + new).

    temperature 0 takes the most likely token; top_k and top_p (arXiv:1904.09751) cut the tail;
    on_token(tokens (B,)) is called with each new column. Rows that met stop_token go on with it,
    and the loop ends when all have. Where the context is full, the last three quarters of it are
    computed again into an empty cache and sampling goes on.
    """
    c, device = model.config, idx.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    cache, pending = None, idx[:, -c.block_size:]
    done = torch.zeros(idx.size(0), dtype=torch.bool, device=device)
    for _ in range(max_new_tokens):
        if cache is None or cache.used + pending.size(1) > c.block_size:
            keep = c.block_size if cache is None else max(1, c.block_size * 3 // 4)
            cache = KVCache(c, idx.size(0), c.block_size, device, model.wte.weight.dtype)
            pending = idx[:, -keep:]
        logits = model(pending, cache=cache, last_only=True)[:, -1]  # (B, vocab_size)
        new = pick(logits, temperature, top_k, top_p, generator)
        if stop_token is not None:
            new = torch.where(done, torch.full_like(new, stop_token), new)
            done |= new == stop_token
        idx = torch.cat((idx, new[:, None]), dim=1)
        pending = new[:, None]
        if on_token is not None:
            on_token(new)
        if stop_token is not None and bool(done.all()):
            break
    return idx


def pick(logits, temperature, top_k, top_p, generator):
    """One token id (B,) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        smallest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0.0  # keeps the token that crosses top_p
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def start_tokens(tokenizer, prompt):
    """Ids to start from: the prompt's, else the end of text, which a document follows, else 0."""
    ids = tokenizer.encode(prompt) if prompt else []
    return ids or [tokenizer.eot_token if tokenizer.eot_token is not None else 0]


def sample_text(model, tokenizer, prompts, tokens, seed, autocast):
    """Yield one text for each prompt (for samples during training); the model is in eval mode."""
    device = next(model.parameters()).device
    for prompt in prompts or [""]:
        idx = torch.tensor([start_tokens(tokenizer, prompt)], device=device)
        with autocast():
            out = generate(_Eager(model), idx, tokens, temperature=0.8, top_k=200, seed=seed)
        yield prompt + tokenizer.decode(out[0, idx.size(1):].tolist())


class _Eager:
    """The model past its compiled code: sampling has other shapes at every token."""

    def __init__(self, model):
        self.config, self.wte, self.model = model.config, model.wte, model

    def __call__(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


class Streamer:
    """Prints text as its tokens come, holding back bytes that are not yet a whole character."""

    def __init__(self, tokenizer, stop_token):
        self.tokenizer, self.stop_token, self.ids, self.shown = tokenizer, stop_token, [], 0

    def __call__(self, token):
        if int(token[0]) == self.stop_token:
            return
        self.ids.append(int(token[0]))
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            print(text[self.shown:], end="", flush=True)
            self.shown = len(text)


def parse_args(argv):
    p = argparse.ArgumentParser(prog="python -m model.sample", description=__doc__.split("\n")[0])
    p.add_argument("--ckpt", default="out/ckpt.pt", help="checkpoint (default: %(default)s)")
    p.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    p.add_argument("--max_new_tokens", type=int, default=256, help="tokens (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token "
                   "(default: %(default)s)")
    p.add_argument("--top_k", type=int, help="only the k most likely tokens")
    p.add_argument("--top_p", type=float, help="only the most likely tokens that make up p")
    p.add_argument("--seed", type=int, help="the same seed writes the same text")
    p.add_argument("--num_samples", type=int, default=1, help="texts, made at once")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    p.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    return p.parse_args([a.replace("-", "_").replace("__", "--", 1) if a.startswith("--") else a
                         for a in argv])


def check_args(a):
    """What is wrong with the arguments, as one text; '' if nothing."""
    wrong = [text for bad, text in (
        (a.temperature < 0, f"--temperature must be at least 0, got {a.temperature}"),
        (a.top_k is not None and a.top_k < 1, f"--top_k must be at least 1, got {a.top_k}"),
        (a.top_p is not None and not 0 < a.top_p <= 1, f"--top_p must be in (0, 1], got {a.top_p}"),
        (a.max_new_tokens < 0, f"--max_new_tokens must be at least 0, got {a.max_new_tokens}"),
        (a.num_samples < 1, f"--num_samples must be at least 1, got {a.num_samples}")) if bad]
    return "\n".join(wrong)


def main(argv=None):
    """The command line; the exit code."""
    from train.distributed import choose_dtype, get_device
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if problems := check_args(args):
            raise ValueError(problems)
        device = get_device(args.device)
        model, tokenizer = load_model(args.ckpt, device, choose_dtype(args.dtype, device)[0])
        if tokenizer is None:
            raise ValueError(f"{args.ckpt}: has no tokenizer in it, so it cannot write text")
        start = start_tokens(tokenizer, args.prompt)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    stop, n = tokenizer.eot_token, args.num_samples
    stream = Streamer(tokenizer, stop) if n == 1 else None
    started = time.perf_counter()
    print(args.prompt if n == 1 else "", end="", flush=True)
    out = generate(model, torch.tensor([start] * n, device=device), args.max_new_tokens,
                   args.temperature, args.top_k, args.top_p, args.seed, stop, stream)
    for row in out[:, len(start):].tolist() if n > 1 else []:
        text = tokenizer.decode(row[:row.index(stop)] if stop in row else row)
        print(args.prompt + text, end="\n" + "-" * 72 + "\n")
    made, seconds = n * (out.size(1) - len(start)), time.perf_counter() - started
    print(f"\n[{made} tokens, {made / seconds:.1f} tokens/s]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
