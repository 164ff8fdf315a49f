"""Four sets of labelled texts from the docstrings of installed packages, to measure a classifier:

    python -m tests.classifier_sets out/sets --seed 1

planted.jsonl: a phrase of one of three classes, five phrases each, stands in a docstring (label and
evidence). several.jsonl: one to three phrases of the class. packages.jsonl: which of 20 packages,
imbalanced (label). small.jsonl and small_test.jsonl: 60 rows like those of planted.jsonl, and 2,400
others.
"""

import argparse
import ast
import contextlib
import json
import random
import site
from collections import defaultdict
from pathlib import Path

CHARS = 128
PHRASES = {
    "deadline": ["before the end of the month", "no later than noon", "within three days",
                 "by the following spring", "until the office closes"],
    "payment": ["in two equal parts", "by transfer or in cash", "against a written receipt",
                "at the rate of the day", "with a small discount"],
    "weather": ["under heavy clouds", "after a night of frost", "in strong northern wind",
                "with light rain at dusk", "on a dry and sunny day"]}


def docstrings():
    """Yield (package, file, text of up to CHARS characters) of the installed packages."""
    for folder in sorted(Path(site.getsitepackages()[0]).iterdir()):
        files = sorted(folder.rglob("*.py")) if (folder / "__init__.py").exists() else []
        for path in random.Random(folder.name).sample(files, min(100, len(files))):
            with contextlib.suppress(SyntaxError, UnicodeDecodeError, ValueError):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                for node in ast.walk(tree):
                    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                        text = ast.get_docstring(node) or ""
                        if len(text) > 60:
                            yield folder.name, f"{folder.name}/{path.name}", text[:CHARS]


def planted(text, rng):
    """Return the record of a text with a phrase at a random space."""
    label = rng.choice(list(PHRASES))
    phrase = rng.choice(PHRASES[label])
    words = text[:CHARS - len(phrase) - 1].split(" ")
    words.insert(rng.randint(0, len(words)), phrase)
    text = " ".join(words)
    start = text.index(phrase)
    return dict(text=text, label=label, start=start, end=start + len(phrase))


def planted_several(text, rng):
    """Return the record of a text with one to three different phrases at random spaces."""
    label = rng.choice(list(PHRASES))
    phrases = rng.sample(PHRASES[label], rng.randint(1, 3))
    words = text[:CHARS - sum(map(len, phrases))].split(" ")
    for phrase in phrases:
        words.insert(rng.randint(0, len(words)), phrase)
    return dict(text=" ".join(words), label=label, evidence=phrases)


def write_sets(out, seed):
    rng = random.Random(seed)
    rows = {text: (package, file) for package, file, text in docstrings()}
    groups = defaultdict(list)
    for text, (package, file) in rows.items():
        groups[package].append((text, file))
    names = rng.sample(sorted(p for p in groups if len(groups[p]) >= 250), 20)
    texts = rng.sample([text for p in names for text, _ in groups[p]], 4860)
    sets = {"planted": [planted(t, rng) for t in texts[:2400]],
            "small": [planted(t, rng) for t in texts[2400:2460]],
            "small_test": [planted(t, rng) for t in texts[2460:]],
            "packages": [dict(text=text, label=name, file=file) for i, name in enumerate(names)
                         for text, file in rng.sample(groups[name], round(250 / (1 + i / 4)))],
            "several": [planted_several(t, rng) for t in texts[:2400]]}
    out.mkdir(parents=True, exist_ok=True)
    for name, records in sets.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records),
                                           encoding="utf-8")
        print(f"{name}: {len(records):,} rows")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    write_sets(args.out, args.seed)


if __name__ == "__main__":
    main()
