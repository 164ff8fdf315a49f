"""Task files: examples that are evaluated at every evaluation of a run, with lm-eval's metrics.

    python run_train.py --config train/config_quick.yaml \\
        --eval_tasks train/configs/python_example.jsonl

A task is a file, which gives the metric the name: val_python_example. An example (a line of JSONL,
or a record of any format of data/records.py) has one of three kinds; `query` and `gold` are
accepted for `question` and `answer`:

    {"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}   the most likely choice is correct
    {"context": "one, two,", "continuation": "three"}             greedy decoding generates it
    {"question": "Two and two?\\n", "answer": "four"}             the same, and then a line end or
                                                                  the end of text

The example's `delimiter` (default: " ") is put before each choice, continuation or answer; before
an answer without choices, the default is "" if the question ends with white space. A chat model's
question is formatted with the chat template, without delimiter, and a choice is scored where an
answer begins in training data; an answer without choices ends with the template's end token.

Metrics: NAME is lm-eval's acc (exact_match for answers without choices); NAME_norm is acc_norm,
with log probabilities divided by the number of characters; NAME_centred is the centred accuracy of
CORE (arXiv:2406.11794), 0 at chance and 1 if everything is correct.
"""

import functools
import itertools
import os
import re
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data.records import parse_records
from data.tokenizer import tokenizer_from_spec
from data.tokenizer_types import encode_within
from model.core.generate import eager_mode
from model.core.ops import chunk_rows
from model.gpt import GPT
from train.base.errors import DataError, SetupError
from train.config import find_file
from train.distributed import broadcast_from_rank0
from train.evaluate import evaluate, join_numbers
from train.logger import LINE_NAMES

CORE_NAMES = dict(query="question", gold="answer")
END = -1  # as the last id to score: any id that ends an answer, see find_ends()


class Example(NamedTuple):
    """An example of a task: a question with one or more choices.

    sequences: for each choice (ids of the question and the choice, n); the last n ids are scored.
    An answer without choices has one for each of the ends that it may have.
    lengths: characters per choice. answer: index of the correct choice. task: index of the task.
    """
    task: int
    sequences: list
    lengths: list
    answer: int

    @property
    def width(self):
        """Length of the longest sequence, in ids, for batch_by_width()."""
        return max(len(ids) for ids, _ in self.sequences)


def find_ends(tokenizer, n_ids):
    """Return which ids end an answer, (n_ids,) bool: the end of text, and those with a line end.

    A line end that is not the first character does not count.
    """
    return torch.tensor([i < tokenizer.n_vocab and (
        i == tokenizer.eot_token or tokenizer.bytes_of(i).startswith(b"\n")) for i in range(n_ids)])


@torch.no_grad()
def score_sequences(model, sequences, is_end=None):
    """Score sequences [(ids, n), ...] in one forward pass of a GPT: the last n ids of each.

    is_end: the result of find_ends(). With it, the last id may be END; its log probability is then
    arbitrary.
    Returns a list of (log probability of these ids, whether greedy decoding generates them). All
    ids but the first are scored if n is 0 or at least len(ids).
    """
    device = model.wte.weight.device
    targets = [ids[1:][-n:] for ids, n in sequences]
    idx = pad_sequence([torch.tensor(ids[:-1]) for ids, _ in sequences], batch_first=True)
    x = model.trunk(idx.to(device))  # (B, T, C)
    x = torch.cat([row[:len(ids) - 1][-n:] for row, (ids, n) in zip(x, sequences)])  # (N, C)
    ids = torch.tensor([*itertools.chain(*targets)], device=device)  # (N,)
    parts = []
    chunk = chunk_rows(model.config.vocab_size, device.type)
    for states, target in zip(x.split(chunk), ids.split(chunk)):
        logprobs = model.logits(states).log_softmax(-1)  # (chunk, V): never of all positions
        best = logprobs.argmax(-1)
        is_greedy = best == target
        if is_end is not None:
            is_greedy |= (target == END) & is_end[best]
        parts.append(torch.stack((logprobs.gather(1, target.clamp(min=0)[:, None])[:, 0],
                                  is_greedy)))
    results = torch.cat(parts, dim=1).cpu().double()  # (2, N)
    return [(float(logprobs.sum()), bool(is_greedy.all()))
            for logprobs, is_greedy in results.split([*map(len, targets)], dim=1)]


# -----------------------------------------------------------------------------
# task files

class ExampleReader:
    """A reader of task files for a Tokenizer, a ChatTemplate or None, and a context of `size` ids.

    Sequences are cut at the start to size + 1 ids, the last of which is only a target.
    """

    def __init__(self, tokenizer, template, size):
        self.tokenizer = tokenizer
        self.template = template
        self.size = size

    def read(self, path, task):
        """Return the Examples in the file `path`, in any format of data/records.py.

        task: index of the task. Raises DataError for invalid records and a missing or empty file.
        """
        path = find_file(path)
        examples = list(parse_records([path], lambda record: self.parse(record, task)))
        if not examples:
            raise DataError(f"{path}: no rows in it")
        return examples

    def parse(self, record, task):
        """Return the Example of a record (a dict, see the module docstring) or raise ValueError."""
        row = {CORE_NAMES.get(k, k): v for k, v in record.items() if v is not None}
        delimiter = get_text(row, "delimiter", " ")
        answer = 0
        if {"context", "continuation"} <= row.keys():
            texts = [get_text(row, "continuation")]
            pairs = self.encode_plain(get_text(row, "context"), texts, delimiter)
        elif not {"question", "answer"} <= row.keys():
            raise ValueError("expected question and answer, optionally with choices, or context "
                             f"and continuation; its fields are {', '.join(record)}")
        elif "choices" in row:
            texts = row["choices"]
            answer = parse_choice(texts, row["answer"])
            question = get_text(row, "question")
            pairs = (self.encode_chat(question, texts) if self.template
                     else self.encode_plain(question, texts, delimiter))
        else:
            question = get_text(row, "question")
            texts = [get_text(row, "answer").lstrip()]
            if "delimiter" not in row and question != question.rstrip():
                delimiter = ""
            pairs = self.encode_answer(question, texts[0], delimiter)
        start = [] if self.tokenizer.eot_token is None else [self.tokenizer.eot_token]
        pairs = [(before or start, ids) for before, ids in pairs]
        if not all(texts):
            raise ValueError("expected an answer, choices or a continuation without an empty text")
        if not all(itertools.chain(*pairs)):
            raise ValueError("the answer, or the text before it, has no token")
        if pairs.count(pairs[answer]) > 1:
            raise ValueError(f"choices: {texts[answer][:60]!r}, the answer, is there twice")
        sequences = [((before + ids)[-self.size - 1:], len(ids)) for before, ids in pairs]
        return Example(task, sequences, [*map(len, texts)], answer)

    def encode_plain(self, question, texts, delimiter):
        """Return (ids of the question, ids of the choice) for each choice in `texts`.

        question + delimiter + choice is encoded as one text. White space between them belongs to
        the choice.
        """
        encode = self.tokenizer.encode
        before = encode(question.rstrip())
        wholes = [encode(question + delimiter + text) for text in texts]
        return [(self.tokenizer.start + before, ids[len(before):]) for ids in wholes]

    def encode_chat(self, question, texts):
        """Return (ids of the question, ids of the choice) in the chat template, for each choice.

        A choice is the start of the assistant's answer, with the same ids as in training data.
        """
        ask = functools.partial(self.template.prompt_ids, [("user", question)], self.tokenizer)
        pairs = []
        for text in texts:  # templates write more before an answer: a space, Qwen 3's <think>
            ids = encode_within(text.lstrip(), self.tokenizer.encode)
            whole = ask(answer=text)
            first = len(whole) - len(ids) if whole[-len(ids):] == ids else len(ask())
            pairs.append((whole[:first], whole[first:]))
        return pairs

    def encode_answer(self, question, answer, delimiter):
        """Return (ids of the question, ids of the answer and its end) for each possible end.

        An end is the template's; without a template, a newline and END. Both are needed, because
        a newline can be one token with the end of the answer, or with more newlines.
        """
        if not self.template:
            before = self.tokenizer.encode(question)
            pairs = []
            for end, special in [("\n", []), ("", [END])]:
                ids = self.tokenizer.encode(f"{question}{delimiter}{answer}{end}")
                if ids[:len(before)] != before:  # a token spans the boundary
                    ids = before + encode_within(f"{delimiter}{answer}{end}", self.tokenizer.encode)
                pairs.append((self.tokenizer.start + before, ids[len(before):] + special))
            return pairs
        messages = [("user", question), ("assistant", answer)]
        ids, mask = self.template.sequences(messages, self.tokenizer)[0]
        first, last = np.flatnonzero(mask)[[0, -1]]
        ids = np.asarray(ids).tolist()
        return [(ids[:first], ids[first:last + 1])]


def parse_choice(choices, answer):
    """Return the index, from 0, of `answer` in a list of two or more texts, `choices`.

    answer: one of the texts (of equal ones the first), or the index, an int. Raises ValueError for
    others.
    """
    if not (isinstance(choices, list) and len(choices) > 1
            and all(isinstance(choice, str) for choice in choices)):
        raise ValueError(f"choices: expected two or more texts, got {str(choices)[:60]!r}")
    if answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer: {str(answer)[:60]!r} is not one of the choices, or its index")
    return answer


def get_text(row, name, default=None):
    value = row.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, got {str(value)[:60]!r}")
    return value


# -----------------------------------------------------------------------------
# evaluation during a run

def batch_by_width(examples, size):
    """Return lists of Examples, widest first, of at most `size` padded tokens or one Example."""
    batches = []
    n_free = 0  # sequences that the last batch can still hold
    for example in sorted(examples, key=lambda example: example.width, reverse=True):
        if len(example.sequences) > n_free:
            batches.append([])
            n_free = size // example.width
        n_free -= len(example.sequences)
        batches[-1].append(example)
    return batches


class Tasks:
    """The evaluation of the task files config.eval_tasks in a run: evaluate() adds the metrics.

    The first config.eval_task_rows examples (0: all) of each file are used. An instance is both the
    data loader (a batch is a list of Examples) and the model for evaluate() in train/evaluate.py.
    Attributes: summary, a text for the log; metrics, the names of all numbers, also of averaged
    weights (ema). All ranks must call. Raises UserError for invalid files, equal names of metrics,
    a model other than a GPT, and data without a tokenizer or a validation part.
    """
    units_per_sample = 1

    def __init__(self, config, data, model, ranks):
        spec = data.spec.get("tokenizer")
        if not isinstance(model, GPT) or not spec or data.val is None:
            raise SetupError("eval_tasks: expected a language model (a GPT) whose data have a "
                             "tokenizer and a validation part; remove the key")
        # data/my-capitals.jsonl is my_capitals
        self.names = [re.sub(r"\W+", "_", os.path.basename(path).partition(".")[0])
                      for path in config.eval_tasks]
        self.eval_iters = config.eval_iters
        self.model = model
        tokenizer = tokenizer_from_spec(spec)
        self.is_end = find_ends(tokenizer, model.config.vocab_size).to(model.wte.weight.device)
        reader = ExampleReader(tokenizer, getattr(model, "template", None), model.config.block_size)
        try:
            tasks = broadcast_from_rank0(lambda: [
                reader.read(path, i) for i, path in enumerate(config.eval_tasks)], ranks)
        except DataError as error:
            raise DataError(f"eval_tasks: {error}") from error
        self.has_choices = [any(len(e.lengths) > 1 for e in examples) for examples in tasks]
        metrics = [*itertools.chain(*map(metric_names, self.names, self.has_choices))]
        taken = {name for name in metrics if name in LINE_NAMES or metrics.count(name) > 1}
        if taken:
            raise SetupError(f"eval_tasks: {', '.join(sorted(taken))}: another number has the same "
                             "name; rename the file")
        self.metrics = [f"val_{name}{end}" for name in metrics for end in ("", "_ema")]
        # eval_task_rows 0: all of them
        selected = [examples[:config.eval_task_rows or None] for examples in tasks]
        self.summary = "Tasks at each evaluation: " + ", ".join(
            f"{name} ({len(some):,} of {len(examples):,} rows)"
            for name, some, examples in zip(self.names, selected, tasks))
        n_tokens = data.val.fixed_batch(0, self.eval_iters)[0].numel()  # per batch
        self.batches = batch_by_width(itertools.chain(*selected), n_tokens)

    def evaluate(self, numbers, batches, ranks, autocast, stop):
        """Return {**numbers, val_TASK: number, ...}; None if stop(done, total) is true on a rank.

        numbers: the result of the evaluation on `batches` validation batches. All examples are
        scored if `batches` is config.eval_iters; otherwise one batch, to know the metrics' names.
        autocast(): returns the context manager of the forward pass. stop is called between batches.
        All ranks must call. Raises SetupError if `numbers` has one of the names.
        """
        task_numbers = evaluate(self, self.forward, self, batches, ranks, autocast, stop)
        if task_numbers is None:
            return None
        del task_numbers["val_loss"]
        return join_numbers(numbers, task_numbers, "eval_tasks")

    # the data loader and the model of evaluate()

    def n_fixed(self, count):
        return len(self.batches) if count == self.eval_iters else 1  # 1: to learn the names

    def fixed_batch(self, index, count, device):
        return self.batches[index],

    def forward(self, examples):
        """Score a batch, a list of Examples; return (a zero loss, sums).

        sums["results"]: (tasks, 4), see numbers(). sums["count"]: number of examples, a tensor.
        """
        if hasattr(self.model, "unshard"):  # FSDP has no hooks on trunk()
            self.model.unshard()
        sequences = [pair for e in examples for pair in e.sequences]
        with eager_mode(self.model):
            scores = iter(score_sequences(self.model, sequences, self.is_end))
        # Per task: rows, correct ones, correct ones by log probability per character, and the
        # expected number of correct ones by chance.
        sums = torch.zeros(len(self.names), 4, dtype=torch.float64)
        for example in examples:
            results = judge(example, [*itertools.islice(scores, len(example.sequences))])
            n = len(example.lengths)
            chance = 1 / n if n > 1 else 0
            sums[example.task] += torch.tensor([1, *results, chance], dtype=torch.float64)
        return torch.zeros(()), dict(results=sums, count=torch.tensor(len(examples)))

    def numbers(self, sums):
        """Return {metric: value} of all tasks; the value is None for a task without examples.

        sums["results"]: (tasks, 4), the numbers of examples, of correct ones, of correct ones by
        log probability per character, and of correct ones expected by chance.
        """
        numbers = {}
        rows = zip(self.names, self.has_choices, sums["results"].tolist())
        for name, has_choices, (n, right, norm, chance) in rows:
            values = (right / n, norm / n, (right - chance) / (n - chance)) if n else [None] * 3
            numbers |= zip(metric_names(name, has_choices), values)
        return numbers


def metric_names(task, has_choices):
    """Return the metrics' names of a task: [task] or [task, task_norm, task_centred]."""
    return [task, f"{task}_norm", f"{task}_centred"] if has_choices else [task]


def judge(example, scores):
    """Return whether the model is correct, and whether by log probability per character.

    scores: results of score_sequences() for the example. With one choice, both values are the same.
    """
    if len(example.lengths) == 1:
        return (any(is_greedy for _, is_greedy in scores),) * 2
    totals = [logprob for logprob, _ in scores]
    means = [logprob / length for logprob, length in zip(totals, example.lengths)]
    return tuple(p.index(max(p)) == example.answer for p in (totals, means))
