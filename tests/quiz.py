"""A small trained model, which is right for some examples, and three task files (see
model/eval/tasks.py) of 200 rows for it."""

import json
import random

from runs import go

MODEL = dict(tokenizer="byte", vocab_size=257, block_size=48, batch_size=8, n_layer=2, n_embd=32,
             n_hidden=64)
LINE = "line %d: the quick brown fox jumps over the lazy dog\n"
WORDS = "quick brown fox jumps over the lazy dog".split()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def choice(rng, i):
    """Return row number `i` of the task "choice", a dict: a question, which may be longer than the
    context, and four choices, parts of words. rng: a random.Random."""
    words, at = rng.sample(WORDS, 4), rng.randrange(4)
    before = (LINE % i * (1 + 2 * (i % 9 == 0))).partition(words[at])[0].rstrip()
    words = [w[:rng.randrange(2, 6)] + "\u00e9" * (i % 5 == 0) for w in words]
    return dict(question=before[:-(i % 4) or None], choices=words, answer=(at + (i % 7 == 0)) % 4)


def cloze(rng, i):
    line = LINE % i
    at = rng.randrange(8, len(line) - 10)
    return dict(context=(LINE % (i + 1))[-(i % 30):] + line[:at], delimiter="",
                continuation=line[at:at + 3 + i % 4] + "e" * (i % 7 == 0))


def written(rng, i):
    line = (LINE % i).strip()
    at = line.rindex(" ", 0, rng.randrange(20, len(line)))
    return dict(question=line[:at], answer=line[at + 1:][:9 + i % 3])


class Quiz:
    """Trains the model on data_dir and writes the task files choice, cloze and written to
    `folder`."""

    def __init__(self, data_dir, folder):
        self.data_dir, self.folder, rng = data_dir, folder, random.Random(1)
        go(data_dir, folder / "run", **MODEL, max_iters=80, eval_interval=0, lr_decay_iters=80)
        self.ckpt = str(folder / "run/ckpt.pt")
        for kind in (choice, cloze, written):
            write_rows(folder / f"{kind.__name__}.jsonl", [kind(rng, i) for i in range(200)])

    def files(self, *names):
        return [str(self.folder / f"{n}.jsonl") for n in names or ("choice", "cloze", "written")]

    def how(self, *names, **changes):
        """Return the configuration, a dict, of a run that only evaluates the model, once and on all
        rows. names: of the tasks (default: all); changes: other keys."""
        return MODEL | dict(init_from=self.ckpt, eval_tasks=self.files(*names), max_iters=0,
                            eval_task_rows=0) | changes

    def evaluate(self, out, *names, **changes):
        """Run the configuration of how() into the folder `out`. Return the numbers of the
        evaluation, a dict."""
        return go(self.data_dir, out, **self.how(*names, **changes))["history"][-1]
