"""Evaluate a checkpoint with the lm-evaluation-harness.

    python -m model.eval.lm_eval --ckpt out/ckpt.pt --tasks lambada_openai,hellaswag --limit 100

The results equal the harness's `hf` model on the exported folder (model/convert/), except for tasks
whose max_gen_toks is more than half of the context: here a prompt keeps half of the context.
https://github.com/EleutherAI/lm-evaluation-harness
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from data.chat_template import encode_marked, parse_messages
from model.core.detokenizer import Detokenizer
from model.core.generate import encode_prompt, find_ends, generate
from model.core.load import BACKBONE, load_model
from model.eval.tasks import score_sequences
from model.gpt import GPT
from train.base.cli import command
from train.base.errors import DataError, require
from train.base.fields import key
from train.base.files import write_text
from train.distributed import get_device

# Names of a task's option, the tokens per answer, and the default, as in the harness.
LENGTH_NAMES = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
MAX_NEW_TOKENS = 256


class CheckpointLM:
    """A GPT with the methods that the lm-evaluation-harness calls.

    evaluate() adds TemplateLM, the harness's base class, as the package may be missing.
    batch_size: texts per forward pass. template: the ChatTemplate for conversations, or None.
    """
    tokenizer_name = ""  # part of the name of a cache, which this command does not use

    def __init__(self, model, tokenizer, batch_size, template=None):
        super().__init__()
        self.model = model
        self.tok = tokenizer
        self.batch_size = batch_size
        self.template = template
        self.ends = template.end_ids(tokenizer) if template else find_ends(model, tokenizer)

    @property
    def eot_token_id(self):
        """Id to put before a text whose first token is scored: BOS, or else the end of text."""
        return encode_prompt(self.tok, "")[0]

    def chat_template(self, name):
        return self.template.jinja

    def apply_chat_template(self, messages, add_generation_prompt=True):
        """Return `messages` as text in the chat template, up to the start of the next answer.

        add_generation_prompt=False: the last message begins that answer, and the text ends with it.
        Special tokens in other messages are marked: tok_encode() encodes them as ordinary text.
        """
        turns = parse_messages(messages, "messages")
        start = "" if add_generation_prompt else turns.pop()[1]
        return self.template.render_before(turns, start, self.tok) + start.lstrip()

    def tok_encode(self, string, add_special_tokens=None, **_):
        ids = encode_marked(string, self.tok) if self.template else self.tok.encode(string)
        return ids if add_special_tokens is False else self.tok.begin(ids)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """Return [(log probability, whether greedy decoding generates it), ...] of continuations.

        requests: (texts for messages, context ids, continuation ids). Of all ids of a request, the
        last block_size + 1 are used.
        Raises DataError for a continuation without ids, or with more than block_size.
        """
        size = self.model.config.block_size + 1
        if wrong := [texts for texts, _, ids in requests if not 0 < len(ids) < size]:
            raise DataError(f"{wrong[0]!r:.200}: the continuation has no token of its own, or more "
                            f"than {size - 1}")
        sequences = [((context + ids)[-size:], len(ids)) for _, context, ids in requests]
        results = []
        for start in range(0, len(sequences), self.batch_size):
            results += score_sequences(self.model, sequences[start:start + self.batch_size])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return the log probability of each text; long texts are split, each token scored once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        results = []
        for request in requests:
            windows = get_rolling_token_windows(self.tok_encode(*request.args), self.eot_token_id,
                                                self.model.config.block_size, 1)
            parts = [("", *make_disjoint_window(window)) for window in windows]
            results.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
        return results

    def generate_until(self, requests, disable_tqdm=False):
        return [self.generate_text(*request.args) for request in requests]

    def generate_text(self, text, options):
        """Return the continuation of `text` up to a stop string or end token, excluding these.

        options: "until", a stop string or several; the maximum number of tokens as one of
        LENGTH_NAMES (default: 256); with "do_sample" True, "temperature", "top_k" and "top_p"
        (default: greedy decoding). Special tokens are left out. If `text` and the maximum exceed
        the context, the start of `text` is cut off; half of the context is always for `text`.
        """
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        n = next(filter(None, map(options.get, LENGTH_NAMES)), MAX_NEW_TOKENS)
        size = self.model.config.block_size
        n_context = max(size - n, size // 2)
        prompt = (self.tok_encode(text) or [self.eot_token_id])[-n_context:]
        detokenizer = Detokenizer(self.tok, until)

        def is_complete(tokens):
            detokenizer.add(int(tokens[0]))
            return detokenizer.stopped
        idx = torch.tensor([prompt], device=self.model.wte.weight.device)
        temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0
        out = generate(self.model, idx, n, temperature, options.get("top_k"), options.get("top_p"),
                       seed=0, stop_token=self.ends, on_token=is_complete, n_vocab=self.tok.n_vocab)
        left_out = {*self.ends, *self.tok.special.values()}
        ids = [i for i in out[0, len(prompt):].tolist() if i not in left_out]
        # As the harness decodes an answer: without the first space, which Llama 2's tokenizer adds.
        text = self.tok.enc.decode(ids) if self.tok.kind == "json" else self.tok.decode(ids)
        for stop in until:
            text = text.split(stop)[0]
        return text


@dataclass
class HarnessOptions:
    """Evaluate a checkpoint with the lm-evaluation-harness (pip install lm-eval)."""
    tasks: list[str] = key([], "names of tasks, separated by commas", required=True)
    ckpt: str = key("out/ckpt.pt", "checkpoint or Hugging Face folder", path=True)
    backbone: str | None = key(None, BACKBONE, path=True)
    num_fewshot: int | None = key(None, "examples before each question (default: the task's)", ge=0)
    limit: int | None = key(None, "evaluate at most N examples per task", ge=1)
    batch_size: int = key(8, "rows per batch", ge=1)
    device: str = key("auto", "auto, cpu, cuda or mps")
    include_path: str | None = key(None, "folder with more task files (.yaml)", metavar="FOLDER")
    apply_chat_template: bool = key(False, "ask in the chat format of the model")
    out: str | None = key(None, "also write all results to this file", metavar="FILE.json")
    log_samples: bool = key(False, "also write each question and answer to the --out file")


def evaluate(options):
    """Run the harness on options.tasks; return the results of lm_eval.simple_evaluate().

    The file options.out, if any, is created first, so that an error of the file system is raised
    early. Raises UserError if the model or an option cannot be used.
    """
    require("lm_eval", "model.eval.lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    o = options
    model, tokenizer = load_model(o.ckpt, get_device(o.device), backbone=o.backbone)
    if not isinstance(model, GPT) or tokenizer is None or tokenizer.eot_token is None:
        raise DataError(f"{o.ckpt}: the harness needs a GPT and a tokenizer with an end of text")
    if o.apply_chat_template and not model.template:
        raise DataError(f"--apply_chat_template: {o.ckpt} is not a chat model")
    if o.log_samples and not o.out:
        raise DataError("--log_samples: needs --out FILE.json")
    manager = TaskManager(include_path=o.include_path)
    if unknown := set(o.tasks).difference(manager.all_tasks):
        raise DataError(f"--tasks: the harness has no {', '.join(unknown)}; see `lm-eval ls tasks`")
    if o.out:  # not after hours of evaluation
        Path(o.out).parent.mkdir(parents=True, exist_ok=True)
        open(o.out, "a").close()
    lm_class = type("TemplateCheckpointLM", (CheckpointLM, TemplateLM), {})
    lm = lm_class(model, tokenizer, o.batch_size, model.template if o.apply_chat_template else None)
    return simple_evaluate(lm, tasks=o.tasks, num_fewshot=o.num_fewshot, limit=o.limit,
                           task_manager=manager, apply_chat_template=o.apply_chat_template)


def report(options):
    """Run the command: evaluate, print a table, and write results to options.out, if any."""
    results = evaluate(options)
    from lm_eval.utils import handle_non_serializable, make_table
    print(make_table(results))
    if options.out:
        names = ["results", "n-samples", *["samples"] * options.log_samples]
        text = json.dumps({name: results[name] for name in names}, indent=2,
                          default=handle_non_serializable)
        write_text(options.out, text)


main = command(HarnessOptions, report)
