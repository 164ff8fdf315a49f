"""Task files: examples that are evaluated at every evaluation of a run, with lm-eval's metrics.

    python run_train.py --config train/config_quick.yaml \\
        --eval_tasks train/configs/python_example.jsonl

A task is a file, which gives the metric the name: val_python_example. An example (a line of JSONL,
or a record of any format of data/records.py) has one of three kinds; `query` and `gold` are
accepted for `question` and `answer`:

    {"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}   the most likely choice is correct
    {"context": "one, two,", "continuation": "three"}             greedy decoding generates it
    {"question": "Two and two?\\n", "answer": "four"}              the same, and then stops

A choice or continuation is preceded by " ", or by the example's `delimiter`. Generated text stops
at a line end, or at one of the strings in `until`. A chat model's question is formatted with the
chat template.

Metrics: NAME is lm-eval's acc (exact_match for generated answers); NAME_norm is acc_norm, with log
probabilities divided by the number of characters; NAME_centred is the centred accuracy of CORE
(arXiv:2406.11794), 0 at chance and 1 if everything is correct.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from data.records import parse_records
from data.tokenizer import tokenizer_from_spec
from model.core.generate import eager_mode, generate
from model.core.ops import chunk_rows
from model.gpt import GPT
from train.base.errors import DataError, SetupError
from train.config import find_file
from train.distributed import broadcast_from_rank0
from train.evaluate import evaluate
from train.keys import task_names
from train.logger import LINE_NAMES

SPARE_TOKENS = 8  # an answer may be longer than the longest expected one by this many tokens
CORE_NAMES = dict(query="question", gold="answer")


class Example(NamedTuple):
    """An example of a task.

    sequences: [(ids, n)] per choice, with the last n ids scored; if the answer is generated, one
    (prompt, length of the answer).
    """
    task: int           # index of the task
    sequences: list
    answer: int | str   # index of the correct choice, or the expected text
    lengths: list = ()  # characters per choice
    until: list = ()    # strings that end the generated text

    @property
    def is_generated(self):
        return isinstance(self.answer, str)

    @property
    def width(self):
        """The length of the longest sequence."""
        return max(len(ids) for ids, _ in self.sequences)


# -----------------------------------------------------------------------------
# log probabilities and greedy answers

@torch.no_grad()
def score_sequences(model, sequences):
    """Return [(log probability of the last n ids, whether greedy decoding generates it)] of
    sequences [(ids, n)], in one forward pass. A sequence may have fewer than n ids."""
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
        parts.append(torch.stack((logprobs.gather(1, target[:, None])[:, 0],
                                  logprobs.argmax(-1) == target)))
    results = torch.cat(parts, dim=1).cpu().double()  # (2, N)
    return [(float(logprobs.sum()), bool(is_greedy.all()))
            for logprobs, is_greedy in results.split([*map(len, targets)], dim=1)]


def generate_greedy(model, prompts, n, n_vocab):
    """Return n greedy ids per prompt, a list of ids; empty lists if the logits are not finite. The
    number of forward passes depends on n only."""
    device = model.wte.weight.device
    idx = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)  # (B, T)
    idx = F.pad(idx, (0, 1))  # two columns or more: a forward pass for the prompts
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    try:
        out = generate(model, idx.to(device), n, temperature=0.0, n_vocab=n_vocab, lengths=lengths)
    except ValueError:  # raised after the last pass
        return [[] for _ in prompts]
    return out[:, idx.size(1):].tolist()


def decode_until(ids, end_tokens, tokenizer, until):
    """Return the text of `ids` up to the first end token or string of `until`."""
    ids = itertools.takewhile(lambda token: token not in end_tokens, ids)
    text = tokenizer.decode(list(ids))
    for stop in until:
        text = text.split(stop)[0]
    return text


# -----------------------------------------------------------------------------
# task files

class ExampleReader:
    """Converts records to examples for a tokenizer, a chat template, if any, and a context of
    `size` tokens."""

    def __init__(self, tokenizer, template, size):
        self.tokenizer = tokenizer
        self.template = template
        self.size = size
        self.eot = [] if tokenizer.eot_token is None else [tokenizer.eot_token]
        self.end_tokens = {*template.end_ids(tokenizer)} if template else {tokenizer.eot_token}

    def read(self, path, task):
        """Return the examples of a file. DataError lists all invalid records."""
        examples = list(parse_records([find_file(path)], lambda record: self.parse(record, task),
                                      hint=""))
        if not examples:
            raise DataError(f"{path}: no rows in it")
        return examples

    def parse(self, record, task):
        """Return the Example of a record. ValueError if it is invalid."""
        row = {CORE_NAMES.get(k, k): v for k, v in record.items() if v is not None}
        is_cloze = {"context", "continuation"} <= row.keys()
        if is_cloze:
            row |= dict(question=row["context"], choices=[row["continuation"]], answer=0)
        if not {"question", "answer"} <= row.keys():
            raise ValueError("expected question and answer, optionally with choices, or context "
                             f"and continuation; its fields are {', '.join(record)}")
        question = get_text(row, "question")
        if "choices" in row:
            answer = parse_choice(row["choices"], row["answer"], least=1 if is_cloze else 2)
            pairs = self.encode(question, row["choices"], None if is_cloze else self.template,
                                get_text(row, "delimiter", " "))
            sequences = [((before + ids)[-self.size - 1:], len(ids)) for before, ids in pairs]
            return Example(task, sequences, answer, [*map(len, row["choices"])])
        answer = get_text(row, "answer").lstrip()
        until = self.parse_until(row, answer)
        [(before, ids)] = self.encode(question, [answer], self.template)
        n = len(ids) + max((len(stop) for stop in until), default=1)
        if n + SPARE_TOKENS >= self.size:
            raise ValueError(f"answer: {n} tokens; the context of this model is {self.size}")
        return Example(task, [(before, n)], answer, until=until)

    def encode(self, question, texts, template, delimiter=None):
        """Return [(ids of the question, ids of the text)] for each text. delimiter: what is between
        the two if they are one text, encoded together as in lm-eval: spaces in between belong to
        the text."""
        encode = self.tokenizer.encode
        if template:
            before = template.prompt_ids([("user", question)], self.tokenizer)
        else:
            before = encode(question if delimiter is None else question.rstrip())
        if template or delimiter is None:
            after = [encode(text) for text in texts]
        else:
            after = [encode(question + delimiter + text)[len(before):] for text in texts]
        before = before or self.eot
        if not before or not all(after):
            raise ValueError("the answer, or the text before it, has no token")
        return [(before, ids) for ids in after]

    def parse_until(self, row, answer):
        """Return the strings that end a generated text. ValueError if they are invalid."""
        until = row.get("until", [] if self.template else "\n")
        until = [until] if isinstance(until, str) else until
        if not isinstance(until, list) or not all(isinstance(s, str) and s for s in until):
            raise ValueError(f"until: expected a string or a list, got {str(until)[:60]!r}")
        if stop := next((stop for stop in until if stop in answer), ""):
            raise ValueError(f"answer: contains {stop!r}, which ends generated text; specify "
                             "another `until`")
        return until


def parse_choice(choices, answer, least):
    """Return the index of the correct choice. ValueError if choices or answer are invalid."""
    if not isinstance(choices, list) or len(choices) < least or not all(
            isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"choices: expected {least} or more non-empty texts, got "
                         f"{str(choices)[:60]!r}")
    if answer in choices:
        return choices.index(answer)
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

def batch_by_width(examples, size, width):
    """Return batches of examples of similar width(example), each of at most `size` tokens or of one
    example."""
    batches, n, n_max = [], 0, 0  # sequences in the last batch, and the maximum
    for example in sorted(examples, key=width, reverse=True):
        n += len(example.sequences)
        if n > n_max:
            batches.append([])
            n, n_max = len(example.sequences), size // width(example)
        batches[-1].append(example)
    return batches


class Tasks:
    """The tasks of a run. For train/evaluate.py it is both the data loader, with lists of examples
    as batches, and the model. Raises UserError for invalid files and unsupported models."""
    units_per_sample = 1

    def __init__(self, config, data, model, ranks):
        spec = data.spec.get("tokenizer")
        if not isinstance(model, GPT) or not spec or data.val is None:
            raise SetupError("eval_tasks: expected a language model (a GPT) whose data have a "
                             "tokenizer and a validation part; remove the key")
        self.names = list(task_names(config.eval_tasks))
        reserved = [name for name in self.names if name in LINE_NAMES]
        if reserved or len(self.names) < len(config.eval_tasks):
            raise SetupError(f"eval_tasks: the name of {', '.join(reserved) or 'two files'} is "
                             "taken; rename the file")
        self.eval_iters = config.eval_iters
        self.model = model
        self.size = model.config.block_size
        self.tokenizer = tokenizer_from_spec(spec)
        reader = ExampleReader(self.tokenizer, getattr(model, "template", None), self.size)
        self.end_tokens = reader.end_tokens
        tasks = broadcast_from_rank0(lambda: [
            reader.read(path, i) for i, path in enumerate(config.eval_tasks)], ranks)
        self.has_choices = [any(len(e.sequences) > 1 for e in examples) for examples in tasks]
        # eval_task_rows 0: all of them
        selected = [examples[:config.eval_task_rows or None] for examples in tasks]
        self.summary = "Tasks at each evaluation: " + ", ".join(
            f"{name} ({len(some):,} of {len(examples):,} rows)"
            for name, some, examples in zip(self.names, selected, tasks))
        n_tokens = data.val.fixed_batch(0, self.eval_iters)[0].numel()  # per batch
        generated = [e for examples in selected for e in examples if e.is_generated]
        scored = [e for examples in selected for e in examples if not e.is_generated]
        self.n_new = SPARE_TOKENS + max((e.sequences[0][1] for e in generated), default=0)
        self.batches = batch_by_width(scored, n_tokens, lambda example: example.width)
        if hasattr(model, "unshard"):  # all ranks must run the same number of forward passes
            self.batches += [[]] * (-len(self.batches) % ranks.world_size)
        # A generated answer needs a whole row of the key-value cache.
        self.batches += batch_by_width(generated, n_tokens, lambda example: self.size)

    def evaluate(self, numbers, batches, ranks, autocast, stop):
        """Add {val_TASK: number} to `numbers`, the result of an evaluation over `batches`. Return
        None if stop() returned true."""
        task_numbers = evaluate(self, self.forward, self, batches, ranks, autocast, stop)
        if task_numbers is None:
            return None
        del task_numbers["val_loss"]
        if clash := task_numbers.keys() & numbers.keys():
            raise SetupError("eval_tasks: evaluations of this model already have "
                             f"{', '.join(clash)}; rename the file")
        return numbers | task_numbers

    # the data loader and the model of evaluate()

    def n_fixed(self, count):
        return len(self.batches) if count == self.eval_iters else 1  # 1: to learn the names

    def fixed_batch(self, index, count, device):
        return self.batches[index],

    def forward(self, examples):
        if hasattr(self.model, "unshard"):  # FSDP has no hooks on trunk()
            self.model.unshard()
        with eager_mode(self.model):
            results = self.evaluate_batch(examples or self.batches[0])
        # Per task: rows, correct ones, correct ones by log probability per character, and the
        # expected number of correct ones by chance.
        sums = torch.zeros(len(self.names), 4, dtype=torch.float64)
        for example, result in zip(examples, results):
            n = len(example.sequences)
            chance = 1 / n if n > 1 else 0
            sums[example.task] += torch.tensor([1, *result, chance], dtype=torch.float64)
        return torch.zeros(()), dict(results=sums, count=torch.tensor(len(examples)))

    def evaluate_batch(self, examples):
        """Return [(is correct, is correct by log probability per character)] of examples of one
        kind."""
        if examples[0].is_generated:
            prompts = [e.sequences[0][0][self.n_new - self.size:] for e in examples]
            outputs = generate_greedy(self.model, prompts, self.n_new, self.tokenizer.n_vocab)
            texts = [decode_until(ids, self.end_tokens, self.tokenizer, e.until)
                     for ids, e in zip(outputs, examples)]
            return [(text.lstrip() == e.answer,) * 2 for text, e in zip(texts, examples)]
        scores = iter(score_sequences(self.model, [pair for e in examples for pair in e.sequences]))
        return [judge(e, [*itertools.islice(scores, len(e.sequences))]) for e in examples]

    def numbers(self, sums):
        """Return {metric: value} of the sums over all batches (see train/system.py)."""
        numbers = {}
        rows = zip(self.names, self.has_choices, sums["results"].tolist())
        for name, has_choices, (n, right, norm, chance) in rows:
            numbers[name] = right / n if n else None
            if has_choices:
                numbers[f"{name}_norm"] = norm / n if n else None
                numbers[f"{name}_centred"] = (right - chance) / (n - chance) if n else None
        return numbers


def judge(example, scores):
    """Return the result of a scored example, see Tasks.evaluate_batch, from score_sequences()."""
    if len(scores) == 1:
        return (scores[0][1],) * 2
    totals = [logprob for logprob, _ in scores]
    means = [logprob / length for logprob, length in zip(totals, example.lengths)]
    return tuple(p.index(max(p)) == example.answer for p in (totals, means))
