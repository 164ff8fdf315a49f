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

SPARE_TOKENS = 8       # an answer may be longer than the longest expected one by this many tokens
SUMS = ("rows", "right", "norm", "chance")


class Example(NamedTuple):
    """An example of a task.

    sequences: [(ids, n)] per choice, with the last n ids scored; if the answer is generated, one
    (prompt, length of the answer).
    """
    task: int          # index of the task
    sequences: list
    lengths: list      # characters per choice
    answer: int | str  # index of the correct choice, or the expected text
    until: list = ()   # strings that end the generated text

    @property
    def is_generated(self):
        return isinstance(self.answer, str)

    @property
    def width(self):
        """The length of the longest sequence."""
        return max(len(ids) for ids, _ in self.sequences)


# -----------------------------------------------------------------------------
# log probabilities and greedy answers

def encode_pair(tokenizer, context, text):
    """Return (ids of the context, ids of the text after it) as lm-eval does: both are encoded
    together, and spaces in between belong to the text."""
    ids = tokenizer.encode(context + text)
    context_ids = tokenizer.encode(context.rstrip())
    return context_ids, ids[len(context_ids):]


@torch.no_grad()
def score_sequences(model, sequences):
    """Return [(log probability of the last n ids, whether greedy decoding generates it)] of
    sequences [(ids, n)], in one forward pass. A sequence may have fewer than n ids."""
    width = max(len(ids) for ids, _ in sequences) - 1
    idx = torch.zeros(len(sequences), width, dtype=torch.int64)  # right-padded
    positions, targets, sizes = [], [], []
    for row, (ids, n) in enumerate(sequences):
        n, end = min(n, len(ids) - 1), row * width + len(ids) - 1
        idx[row, :len(ids) - 1] = torch.tensor(ids[:-1])
        positions += range(end - n, end)
        targets += ids[len(ids) - n:]
        sizes.append(n)
    device = model.wte.weight.device
    x = model.trunk(idx.to(device)).flatten(0, 1)[positions]  # (N, C)
    targets = torch.tensor(targets, device=device)
    scores, is_greedy, chunk = [], [], chunk_rows(model.config.vocab_size, device.type)
    for states, ids in zip(x.split(chunk), targets.split(chunk)):
        logprobs = model.logits(states).log_softmax(-1)  # (chunk, V): never of all positions
        scores.append(logprobs.gather(1, ids[:, None])[:, 0])
        is_greedy.append(logprobs.argmax(-1) == ids)
    scores, is_greedy = (torch.cat(parts).cpu().split(sizes) for parts in (scores, is_greedy))
    return [(float(s.double().sum()), bool(g.all())) for s, g in zip(scores, is_greedy)]


def generate_greedy(model, prompts, n, n_vocab):
    """Return n greedy ids per prompt, a list of ids; empty lists if the logits are not finite. The
    number of forward passes depends on n only."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    idx = torch.zeros(len(prompts), max(2, int(lengths.max())), dtype=torch.int64)
    for row, ids in zip(idx, prompts):
        row[:len(ids)] = torch.tensor(ids)
    device = model.wte.weight.device
    try:
        out = generate(model, idx.to(device), n, temperature=0.0, n_vocab=n_vocab,
                       lengths=lengths.to(device))
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
        self.tokenizer, self.template, self.size = tokenizer, template, size
        self.eot = [] if tokenizer.eot_token is None else [tokenizer.eot_token]
        self.end_tokens = {*template.end_ids(tokenizer)} if template else {tokenizer.eot_token}

    def read(self, path, task):
        """Return the examples of a file. DataError lists all invalid records."""
        examples, problems = [], []
        for where, record in source_records(find_file(path)):
            try:
                if isinstance(record, ValueError):
                    raise record
                examples.append(self.parse(record, task))
            except (ValueError, RecursionError) as error:
                problems.append((where, str(error)))
        raise_problems(problems or [(path, "no rows in it")][:not examples])
        return examples

    def parse(self, record, task):
        """Return the Example of a record. ValueError if it is invalid."""
        if not isinstance(record, dict):
            raise ValueError(f"expected an object with named fields, got {str(record)[:60]!r}")
        row = {dict(query="question", gold="answer").get(k, k): v for k, v in record.items()
               if v is not None}
        delimiter = get_text(row, "delimiter", " ")
        if {"context", "continuation"} <= row.keys():
            text = get_text(row, "continuation")
            sequence = self.encode_text(get_text(row, "context"), delimiter, text)
            return Example(task, [sequence], [len(text)], 0)
        if not {"question", "answer"} <= row.keys():
            raise ValueError("expected question and answer, optionally with choices, or context "
                             f"and continuation; its fields are {', '.join(record)}")
        question, choices = get_text(row, "question"), row.get("choices")
        if choices is None:
            return self.parse_generated(question, row, task)
        answer = parse_choice(choices, row["answer"])
        sequences = [self.encode_text(question, delimiter, choice, is_question=True)
                     for choice in choices]
        return Example(task, sequences, [len(choice) for choice in choices], answer)

    def encode_text(self, context, delimiter, text, is_question=False):
        """Return (ids, n): a context or question, and a text with n ids, which are scored."""
        if is_question and self.template:
            before, ids = self.encode_question(context), self.tokenizer.encode(text)
        else:
            before, ids = encode_pair(self.tokenizer, context, delimiter + text)
        before = before or self.eot
        if not ids or not before:
            raise ValueError("the scored text, or the text before it, has no token")
        return (before + ids)[-self.size - 1:], len(ids)

    def encode_question(self, question):
        return self.template.prompt_ids([("user", question)], self.tokenizer)

    def parse_generated(self, question, row, task):
        """Return the Example of a question with a generated answer."""
        answer, until = get_text(row, "answer").lstrip(), row.get("until")
        until = [until] if isinstance(until, str) else until
        if until is None:
            until = [] if self.template else ["\n"]
        if not isinstance(until, list) or not all(isinstance(s, str) and s for s in until):
            raise ValueError(f"until: expected a string or a list, got {str(until)[:60]!r}")
        if stop := next((stop for stop in until if stop in answer), ""):
            raise ValueError(f"answer: contains {stop!r}, which ends generated text; specify "
                             "another `until`")
        encode = self.encode_question if self.template else self.tokenizer.encode
        ids = encode(question) or self.eot
        if not ids:
            raise ValueError("question: empty")
        n = len(self.tokenizer.encode(answer)) + max((len(s) for s in until), default=1)
        if n + SPARE_TOKENS >= self.size:
            raise ValueError(f"answer: {n} tokens; the context of this model is {self.size}")
        return Example(task, [(ids, n)], [len(answer)], answer, until)


def parse_choice(choices, answer):
    """Return the index of the correct choice. ValueError if choices or answer are invalid."""
    if not isinstance(choices, list) or len(choices) < 2 or not all(
            isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices: expected 2 or more non-empty texts, got "
                         f"{str(choices)[:60]!r}")
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    if answer not in choices:
        raise ValueError(f"answer: {str(answer)[:60]!r} is not one of the choices; expected one, "
                         f"or its index, 0 to {len(choices) - 1}")
    return choices.index(answer)


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
        self.names, self.eval_iters = [*task_names(config.eval_tasks)], config.eval_iters
        self.model = model
        self.tokenizer = self.check(config, data)
        self.size = model.config.block_size
        reader = ExampleReader(self.tokenizer, getattr(model, "template", None), self.size)
        self.end_tokens = reader.end_tokens
        tasks = broadcast_from_rank0(lambda: [
            reader.read(path, i) for i, path in enumerate(config.eval_tasks)], ranks)
        self.has_choices = [any(len(example.sequences) > 1 for example in examples)
                            for examples in tasks]
        # eval_task_rows 0: all of them
        selected = [examples[:config.eval_task_rows or None] for examples in tasks]
        self.summary = "Tasks at each evaluation: " + ", ".join(
            f"{name} ({len(some):,} of {len(examples):,} rows)"
            for name, some, examples in zip(self.names, selected, tasks))
        n_tokens = data.val.fixed_batch(0, self.eval_iters)[0].numel()  # per batch
        self.batches = self.create_batches([*itertools.chain(*selected)], n_tokens, ranks)

    def check(self, config, data):
        """Return the tokenizer. SetupError if this model or these names are not supported."""
        spec = data.spec.get("tokenizer")
        if not isinstance(self.model, GPT) or not spec or data.val is None:
            raise SetupError("eval_tasks: expected a language model (a GPT) whose data have a "
                             "tokenizer and a validation part; remove the key")
        reserved = [name for name in self.names if name in LINE_NAMES]
        if reserved or len(self.names) < len(config.eval_tasks):
            raise SetupError(f"eval_tasks: the name of {', '.join(reserved) or 'two files'} is "
                             "taken; rename the file")
        return tokenizer_from_spec(spec)

    def create_batches(self, examples, size, ranks):
        """Return batches of scored examples, followed by batches of generated examples."""
        generated = [example for example in examples if example.is_generated]
        scored = [example for example in examples if not example.is_generated]
        self.n_new = max((example.sequences[0][1] for example in generated), default=0)
        self.n_new += SPARE_TOKENS
        batches = batch_by_width(scored, size, lambda example: example.width)
        if hasattr(self.model, "unshard"):  # all ranks must run the same number of forward passes
            batches += [[]] * (-len(batches) % ranks.world_size)
        # A generated answer needs a whole row of the key-value cache.
        return batches + batch_by_width(generated, size, lambda example: self.size)

    def evaluate(self, numbers, batches, ranks, autocast, stop):
        """Add {val_TASK: number} to `numbers`, the result of an evaluation over `batches`. Return
        None if stop() returned true."""
        task_numbers = evaluate(self, self.forward, self, batches, ranks, autocast, stop)
        if task_numbers is None:
            return None
        del task_numbers["val_loss"]
        if clash := task_numbers.keys() & numbers.keys():
            raise SetupError(f"eval_tasks: evaluations of this model already have "
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
        sums = {name: torch.zeros(len(self.names), dtype=torch.float64) for name in SUMS}
        for example, (right, norm) in zip(examples, results):
            n = len(example.sequences)
            for name, value in zip(SUMS, (1, right, norm, 1 / n if n > 1 else 0.0)):
                sums[name][example.task] += value
        return torch.zeros(()), sums | dict(count=torch.tensor(len(examples)))

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
        return [self.judge(e, [*itertools.islice(scores, len(e.sequences))]) for e in examples]

    @staticmethod
    def judge(example, scores):
        """Return the result of one example from [(log probability, is greedy)] per sequence."""
        if len(scores) == 1:
            return (scores[0][1],) * 2
        sums = [score for score, _ in scores]
        means = [score / length for score, length in zip(sums, example.lengths)]
        return tuple(s.index(max(s)) == example.answer for s in (sums, means))

    def numbers(self, sums):
        """Return {metric: value} of the sums over all batches (see train/system.py)."""
        numbers = {}
        for i, name in enumerate(self.names):
            n, right, norm, chance = (float(sums[part][i]) for part in SUMS)
            metrics = {name: right}
            if self.has_choices[i]:
                centred = (right - chance) / (1 - chance / n) if n else 0.0
                metrics |= {f"{name}_norm": norm, f"{name}_centred": centred}
            numbers |= {key: value / n if n else None for key, value in metrics.items()}
        return numbers
