"""Tasks: questions of one's own, answered at every evaluation, with the numbers of lm-eval.

    python run_train.py --config train/config_quick.yaml --eval_tasks train/configs/python_example.jsonl

A file is a task, its name the log's: val_python_example. A row (JSONL, or another format of
data/records.py) is one of three kinds; `query` and `gold` stand for `question` and `answer`, too:

    {"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}   the likeliest choice is right
    {"context": "one, two,", "continuation": "three"}             greedy decoding writes it
    {"question": "Two and two?\\n", "answer": "four"}              so does it here, and then ends

Before a choice or a continuation stands " ", or what the row has as `delimiter`. What is written
ends at a new line, or at one of the texts of `until`. A model that learned chats is asked questions
as it learned to be; elsewhere the text is as it is.

The shares that are right are lm-eval's acc (exact_match, for what is written), _norm its acc_norm:
a choice's log probability by its characters. _centred is that of CORE (arXiv:2406.11794), 0 at
chance and 1 where all is right.
"""

import itertools
from typing import NamedTuple

import torch

from data.records import raise_problems, source_records
from data.tokenizer import tokenizer_from_spec
from model.core.generate import eager_mode, generate
from model.core.ops import chunk_rows
from model.gpt import GPT
from train.base.errors import SetupError
from train.config import find_file
from train.distributed import broadcast_from_rank0
from train.evaluate import evaluate
from train.keys import task_names
from train.logger import LINE_NAMES

SPARE = 8     # tokens that an answer may be longer than the longest that is expected
STEP = 128    # what a token costs that is written: as many that are read (train/LOG.md)
SUMS = ("rows", "right", "norm", "chance")


class Row(NamedTuple):
    """A question. asked: [(ids, how many of the last are scored)], one for each choice."""
    task: int          # number of its file
    asked: list
    lengths: list      # characters of each choice
    answer: int | str  # number of the right choice, or the text to be written
    until: list = ()   # texts that end what is written

    @property
    def width(self):
        return max(len(ids) for ids, _ in self.asked)


# -----------------------------------------------------------------------------
# log probabilities, and greedy answers

def encode_pair(tokenizer, context, text):
    """(ids of the context, ids of the text that follows), as lm-eval has them: of both together,
    and blanks at the seam belong to the text."""
    end = len(context.rstrip())
    ids, before = tokenizer.encode(context + text), tokenizer.encode(context[:end])
    return before, ids[len(before):]


@torch.no_grad()
def logprobs(model, rows):
    """[(log probability, whether greedy decoding writes them)] of the last n ids of each of `rows`
    [(ids, n)], in one forward pass. A row may have fewer."""
    width = max(len(ids) for ids, _ in rows) - 1
    idx, at, sizes = torch.zeros(len(rows), width, dtype=torch.int64), [], []
    for r, (ids, n) in enumerate(rows):  # what stands behind a row changes nothing in it
        idx[r, :len(ids) - 1] = torch.tensor(ids[:-1])
        sizes.append(min(n, len(ids) - 1))
        at += range(r * width + len(ids) - 1 - sizes[-1], r * width + len(ids) - 1)
    device = model.wte.weight.device
    x = model.trunk(idx.to(device)).flatten(0, 1)[at]  # (N, C) of all that is scored
    targets = torch.tensor([i for (ids, _), n in zip(rows, sizes) for i in ids[len(ids) - n:]])
    scores, greedy, chunk = [], [], chunk_rows(model.config.vocab_size, device.type)
    for states, wanted in zip(x.split(chunk), targets.to(device).split(chunk)):
        z = model.logits(states).log_softmax(-1)  # (chunk, V): never of all tokens at once
        scores.append(z.gather(1, wanted[:, None])[:, 0])
        greedy.append(z.argmax(-1) == wanted)
    scores, greedy = (torch.cat(parts).cpu().split(sizes) for parts in (scores, greedy))
    return [(float(s.double().sum()), bool(g.all())) for s, g in zip(scores, greedy)]


def write(model, prompts, n, n_vocab):
    """The n ids that greedy decoding writes after each of `prompts`, lists of ids with room for as
    many behind them: a list of lists, empty ones where logits are not finite. Every call with this
    n makes as many forward passes."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    idx = torch.zeros(len(prompts), max(2, int(lengths.max())), dtype=torch.int64)
    for row, ids in zip(idx, prompts):
        row[:len(ids)] = torch.tensor(ids)
    device = model.wte.weight.device
    try:
        out = generate(model, idx.to(device), n, temperature=0.0, n_vocab=n_vocab,
                       lengths=lengths.to(device))
    except ValueError:  # not finite; said after the last pass
        return [[] for _ in prompts]
    return out[:, idx.size(1):].tolist()


def text_of(ids, ends, tokenizer, until):
    """The text of `ids` up to one of the tokens `ends`, and to one of the texts `until`."""
    text = tokenizer.decode(list(itertools.takewhile(lambda token: token not in ends, ids)))
    for stop in until:
        text = text.split(stop)[0]
    return text


# -----------------------------------------------------------------------------
# rows of files

class Reader:
    """Makes rows of records, for a model with this tokenizer, template of chats (None: it learned
    none) and context of so many tokens (size)."""

    def __init__(self, tokenizer, template, size):
        self.tok, self.template, self.size = tokenizer, template, size
        self.ends = {tokenizer.eot_token}
        if template:
            self.ends = {*template.end_ids(tokenizer)}

    def read(self, path, task):
        """The rows of a file. DataError with a line for each that is none."""
        rows, problems = [], []
        for where, record in source_records(find_file(path), "train", None):
            try:
                if isinstance(record, ValueError):
                    raise record
                rows.append(self.row(record, task))
            except (ValueError, RecursionError) as error:
                problems.append((where, str(error)))
        raise_problems(problems or [(path, "no rows in it")][:not rows])
        return rows

    def row(self, record, task):
        """The Row of a record. ValueError."""
        if not isinstance(record, dict):
            raise ValueError(f"expected an object with named fields, got {str(record)[:60]!r}")
        has = {dict(query="question", gold="answer").get(k, k): v for k, v in record.items()
               if v is not None}
        gap = text_in(has, "delimiter", " ")
        if {"context", "continuation"} <= has.keys():
            said = text_in(has, "continuation")
            return Row(task, [self.scored(text_in(has, "context"), gap, said)], [len(said)], 0)
        if not {"question", "answer"} <= has.keys():
            raise ValueError("expected question and answer, with choices or without them, or "
                             f"context and continuation; its fields are {', '.join(record)}")
        question, choices, answer = text_in(has, "question"), has.get("choices"), has["answer"]
        if choices is None:
            return self.written(question, has, task)
        if not isinstance(choices, list) or len(choices) < 2 or not all(
                isinstance(choice, str) and choice for choice in choices):
            raise ValueError("choices: expected 2 texts or more, none of them empty, got "
                             f"{str(choices)[:60]!r}")
        if type(answer) is not int or not 0 <= answer < len(choices):
            if answer not in choices:
                raise ValueError(f"answer: {str(answer)[:60]!r} is none of the choices; expected "
                                 f"one of them, or its number, 0 to {len(choices) - 1}")
            answer = choices.index(answer)
        return Row(task, [self.scored(question, gap, choice, ask=True) for choice in choices],
                   [len(choice) for choice in choices], answer)

    def scored(self, context, gap, text, ask=False):
        """(ids, how many of the last are scored) of a text after a context, or, if `ask`, a
        question."""
        if ask and self.template:
            before, ids = self.prompt(context), self.tok.encode(text)
        else:
            before, ids = encode_pair(self.tok, context, gap + text)
        if not ids or not before and self.tok.eot_token is None:
            raise ValueError("what is scored, or stands before it, has no token")
        return ((before or [self.tok.eot_token]) + ids)[-self.size - 1:], len(ids)

    def prompt(self, question):
        return self.template.prompt_ids([("user", question)], self.tok)

    def written(self, question, has, task):
        """The Row of a question whose answer is written."""
        answer, until = text_in(has, "answer").lstrip(), has.get("until")
        until = [until] if isinstance(until, str) else until
        if until is None:
            until = [] if self.template else ["\n"]
        if not isinstance(until, list) or not all(isinstance(s, str) and s for s in until):
            raise ValueError(f"until: expected a text or a list of them, got {str(until)[:60]!r}")
        if stop := next((stop for stop in until if stop in answer), ""):
            raise ValueError(f"answer: holds {stop!r}, where what is written ends; expected "
                             "another `until` in this row")
        ids = self.prompt(question) if self.template else self.tok.encode(question)
        if not ids and self.tok.eot_token is None:
            raise ValueError("question: empty")
        n = len(self.tok.encode(answer)) + max((len(s) for s in until), default=1)
        if n + SPARE >= self.size:
            raise ValueError(f"answer: {n} tokens; the context of this model is {self.size}")
        return Row(task, [(ids or [self.tok.eot_token], n)], [len(answer)], answer, until)


def text_in(record, name, default=None):
    value = record.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, got {str(value)[:60]!r}")
    return value


# -----------------------------------------------------------------------------
# all of them at an evaluation

def first_rows(rows, budget):
    """The first of a task's rows that cost at most `budget`, or the very first."""
    costs = itertools.accumulate(map(cost, rows))
    return rows[:max(1, sum(total <= budget for total in costs))]


def cost(row):
    """In tokens that are read."""
    if isinstance(row.answer, str):
        return row.width + STEP * (row.asked[0][1] + SPARE)
    return row.width * len(row.asked)


def batched(rows, size, width):
    """Lists of rows of about the same width, of at most `size` tokens where one is so little."""
    out, taken, most = [], 0, 0  # texts in the last one, and how many it may have
    for row in sorted(rows, key=width, reverse=True):
        taken += len(row.asked)
        if taken > most:
            out.append([])
            taken, most = len(row.asked), size // width(row)
        out[-1].append(row)
    return out


class Tasks:
    """The tasks of a run, for train/evaluate.py both the loader, whose batches are lists of rows,
    and the model. Raises UserError: what is wrong with a file, or with what is trained."""
    units_per_sample = 1

    def __init__(self, config, data, model, ranks):
        self.names, self.count = [*task_names(config.eval_tasks)], config.eval_iters
        spec = data.spec.get("tokenizer")
        if not isinstance(model, GPT) or not spec or data.val is None:
            raise SetupError("eval_tasks: expected a language model (a GPT) whose data have a "
                             "tokenizer and a validation part; leave the key out for this one")
        bad = [n for n in self.names if n in LINE_NAMES]
        if bad or len(self.names) < len(config.eval_tasks):
            raise SetupError(f"eval_tasks: {', '.join(bad) or 'two files'} of a name that is "
                             "taken: log lines have it; rename the file")
        self.model, self.tok = model, tokenizer_from_spec(spec)
        self.size = model.config.block_size
        reader = Reader(self.tok, getattr(model, "template", None), self.size)
        self.ends = reader.ends
        every = broadcast_from_rank0(lambda: [reader.read(path, i) for i, path in enumerate(
            config.eval_tasks)], ranks)
        self.chosen = [any(len(row.asked) > 1 for row in rows) for rows in every]
        # The loss is of so many tokens, `batch` of them at once: as many are spent here.
        batch = data.val.fixed_batch(0, self.count)[0].numel()
        budget = data.val.n_fixed(self.count) * batch
        taken = self.taken(every, budget, config.eval_task_rows)
        self.told = "Tasks at each evaluation: " + ", ".join(
            f"{name} ({len(some):,} of {len(rows):,} rows)"
            for name, some, rows in zip(self.names, taken, every))
        self.told += (f": {sum(map(cost, itertools.chain(*taken))):,} tokens, beside the "
                      f"{budget:,} of the loss")
        if taken != every:
            self.told += "; eval_task_rows: 0 takes all"
        self.batches = self.in_batches([*itertools.chain(*taken)], batch, ranks)

    @staticmethod
    def taken(every, budget, limit):
        """The rows of each task: its first `limit` (0: all); without one those that cost no more
        than its share of the budget, of which small tasks leave the rest to others."""
        if limit is not None:
            return [rows[:limit or None] for rows in every]
        out = {}
        for i in sorted(range(len(every)), key=lambda i: sum(map(cost, every[i]))):
            out[i] = first_rows(every[i], budget // (len(every) - len(out)))
            budget -= sum(map(cost, out[i]))
        return [out[i] for i in range(len(every))]

    def in_batches(self, rows, size, ranks):
        """Batches of rows that are scored, then of those that are written."""
        written = [row for row in rows if isinstance(row.answer, str)]
        self.n_new = max((row.asked[0][1] for row in written), default=0) + SPARE
        scored = batched([row for row in rows if isinstance(row.answer, int)], size,
                         lambda row: row.width)
        if hasattr(self.model, "unshard"):  # all ranks of a round make as many forward passes
            scored += [[]] * (-len(scored) % ranks.world_size)
        # A row that is written has a row of the cache.
        return scored + batched(written, size, lambda row: self.size)

    def evaluate(self, found, batches, ranks, autocast, stop):
        """`found`, the numbers of an evaluation over `batches`, and {val_TASK: number}. None where
        asked to stop."""
        numbers = evaluate(self, self.forward, self, batches, ranks, autocast, stop)
        if numbers is None:
            return None
        del numbers["val_loss"]
        if clash := numbers.keys() & found.keys():
            raise SetupError(f"eval_tasks: evaluations of this model have {', '.join(clash)} "
                             "already; rename the file")
        return found | numbers

    # what evaluate() asks for

    def n_fixed(self, count):
        return len(self.batches) if count == self.count else 1  # 1: which numbers are there?

    def fixed_batch(self, index, count, device):
        return self.batches[index],

    def forward(self, rows):
        if hasattr(self.model, "unshard"):  # trunk() is called without what stands around forward()
            self.model.unshard()
        with eager_mode(self.model):
            results = self.results(rows or self.batches[0])
        sums = {name: torch.zeros(len(self.names), dtype=torch.float64) for name in SUMS}
        for row, (right, norm) in zip(rows, results):
            chance = 1 / len(row.asked) if len(row.asked) > 1 else 0.0
            for name, value in zip(SUMS, (1, right, norm, chance)):
                sums[name][row.task] += value
        return torch.zeros(()), sums | dict(count=torch.tensor(len(rows)))

    def results(self, rows):
        """[(whether it is right, the same by length)] of rows of one kind."""
        if isinstance(rows[0].answer, str):
            said = write(self.model, [row.asked[0][0][self.n_new - self.size:] for row in rows],
                         self.n_new, self.tok.n_vocab)
            same = [text_of(ids, self.ends, self.tok, row.until).lstrip() == row.answer
                    for ids, row in zip(said, rows)]
            return list(zip(same, same))
        scores, out = iter(logprobs(self.model, [pair for row in rows for pair in row.asked])), []
        for row in rows:
            found = list(itertools.islice(scores, len(row.asked)))
            sums = [score for score, _ in found]
            each = [score / length for score, length in zip(sums, row.lengths)]
            out.append((found[0][1],) * 2 if len(found) == 1 else
                       tuple(scores.index(max(scores)) == row.answer for scores in (sums, each)))
        return out

    def numbers(self, sums):
        out = {}
        for i, name in enumerate(self.names):
            n, right, norm, chance = (float(sums[part][i]) for part in SUMS)
            own = {name: right}
            if self.chosen[i]:
                own |= {f"{name}_norm": norm, f"{name}_centred": (right - chance) / (1 - chance / n)
                        if n else 0.0}
            out |= {key: value / n if n else None for key, value in own.items()}
        return out
