"""A checkpoint in the lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness):

    python -m model.eval.lm_eval --ckpt out/ckpt.pt --tasks lambada_openai,hellaswag --limit 100

The numbers are those of the harness's own `hf` model on the exported folder (model/convert/).
"""

import json
import sys
from dataclasses import dataclass

import torch

from model.core.generate import generate
from model.core.load import load_model
from model.eval.tasks import logprobs, text_of
from train.base.cli import run_command
from train.base.errors import DataError
from train.base.fields import key

NEW_TOKENS = 256  # of an answer, where a task does not say


class Finished(Exception):
    """An answer has come to one of its stop strings."""


class Scorer:
    """What the harness's TemplateLM leaves to a model, but for the class itself: see evaluate."""

    def __init__(self, model, tokenizer, batch_size):
        super().__init__()
        self.model, self.tok, self.batch_size = model, tokenizer, batch_size
        self.home = model.wte.weight.device  # TemplateLM has a device of its own

    @property
    def eot_token_id(self):
        return self.tok.eot_token

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.tok.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """[(log probability, whether greedy decoding writes it)] of the last ids of each of
        `requests` (strings, ids before, ids), batched by length."""
        size, out = self.model.config.block_size, [None] * len(requests)
        rows = [((before + ids)[-(size + 1):], len(ids)) for _, before, ids in requests]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start:start + self.batch_size]
            for i, result in zip(batch, logprobs(self.model, [rows[i] for i in batch])):
                out[i] = result
        return out

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log probability of each text, in windows that do not overlap but for one token."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        out = []
        for text, in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id,
                                                self.model.config.block_size, 1)
            parts = [("", *make_disjoint_window(window)) for window in windows]
            out.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
        return out

    def generate_until(self, requests, disable_tqdm=False):
        return [self.answer(*request.args) for request in requests]

    def answer(self, text, how):
        """The model's continuation of `text` up to the first of how["until"], greedy unless the
        task samples."""
        until = how.get("until") or []
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        n, said = how.get("max_gen_toks", NEW_TOKENS), []
        room = max(1, self.model.config.block_size - n)
        ids = (self.tok_encode(text) or [self.eot_token_id])[-room:]

        def on_token(token):
            said.append(int(token[0]))
            if said[-1] == self.eot_token_id or any(s in self.tok.decode(said) for s in until):
                raise Finished
        try:
            temperature = how.get("temperature", 1.0) if how.get("do_sample") else 0
            generate(self.model, torch.tensor([ids], device=self.home), n, temperature,
                     how.get("top_k"), how.get("top_p"), seed=0, on_token=on_token,
                     n_vocab=self.tok.n_vocab)
        except Finished:
            pass
        return text_of(said, {self.eot_token_id}, self.tok, until)


def evaluate(ckpt, tasks, num_fewshot=None, limit=None, batch_size=8, device="auto",
             include_path=None):
    """The harness's result of `tasks` (names) on the model of `ckpt`, a dict. UserError."""
    from train.distributed import get_device
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DataError(f"model.eval.lm_eval needs the package lm-eval ({error}): pip install lm-eval"
                        ) from None
    model, tokenizer = load_model(ckpt, get_device(device))
    if tokenizer is None or tokenizer.eot_token is None:
        raise DataError(f"{ckpt}: names no tokenizer with an end of text, which the harness needs")
    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise DataError(f"--tasks: the harness has no {', '.join(unknown)}; `lm-eval ls tasks` "
                        "lists its own, --include_path adds a folder of yours")
    scorer = type("CheckpointLM", (Scorer, TemplateLM), {})(model, tokenizer, batch_size)
    return simple_evaluate(scorer, tasks=tasks, num_fewshot=num_fewshot, limit=limit,
                           task_manager=manager)


@dataclass
class Options:
    """Evaluate a checkpoint with the lm-evaluation-harness (pip install lm-eval)."""
    tasks: list[str] = key([], "names of tasks, separated by commas", required=True)
    ckpt: str = key("out/ckpt.pt", "checkpoint or Hugging Face folder")
    num_fewshot: int | None = key(None, "examples before each question (default: the task's)", ge=0)
    limit: int | None = key(None, "evaluate at most N examples per task", ge=1)
    batch_size: int = key(8, "rows per batch", ge=1)
    device: str = key("auto", "auto, cpu, cuda or mps")
    include_path: str | None = key(None, "folder with more task files (.yaml)", metavar="FOLDER")
    out: str | None = key(None, "also write all results to this file", metavar="FILE.json")


def main(argv=None):
    """Run the command line; return the exit code."""
    return run_command(Options, lambda options: report(**vars(options)), argv)


def report(out, **how):
    """Evaluate, print the table, and write all results to the file `out`, if it is named."""
    results = evaluate(**how)
    if out:
        with open(out, "w", encoding="utf-8") as f:
            json.dump({k: results[k] for k in ("results", "n-samples")}, f, indent=2)
    from lm_eval.utils import make_table
    print(make_table(results))


if __name__ == "__main__":
    sys.exit(main())
