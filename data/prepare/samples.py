"""The steps that the commands chat, pairs and prompts share, from reading records to a summary."""

import os
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from data.chat_template import ChatTemplate, open_chat_format
from data.meta import Meta, write_meta
from data.prepare.folders import FolderOptions, new_folder, report, start_option
from data.prepare.sources import source_name
from data.records import SOURCES, parse_records
from data.rows import id_dtype, pad_rows, split_by_prompt
from data.tokenizer import write_tokenizer
from train.base.errors import DataError, quote_path
from train.base.fields import key


@dataclass
class SampleOptions(FolderOptions):
    """Options of the commands chat, pairs and prompts."""
    sources: list[str] = key([], f"{SOURCES}; or example, example-more: questions about the names "
                             "in Python's standard library", positional=True, required=True,
                             metavar="SOURCE")
    block_size: int | None = key(None, "tokens per row (default: the checkpoint's, else 512)", ge=1,
                                 le=1 << 24)
    num_samples: int | None = key(None, "use only the first N records", ge=1)
    val_fraction: float = key(0.1, "share for validation, by a hash of the prompt", gt=0, lt=1)
    skip_bad: bool = key(False, "leave out invalid records")


def example_records(source):
    """Yield (location, record) of questions about names in Python's standard library.

    record: {"prompt", "response", "chosen", "rejected"}; the prompt requests a different spelling,
    e.g. in CamelCase; response and chosen are the correct answer; in rejected, the case of one
    letter is changed. source: "example", or "example-more" for further spellings.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [*library.glob("*.py"), *(path for path in library.glob("*/*.py")
                                      if not re.search("test|packages", path.parent.name))]
    text = "".join(path.read_text("utf-8", "replace") for path in files)
    names = sorted(set(re.findall(r"\b[a-z]{2,9}(?:_[a-z]{2,9}){1,2}\b", text)))
    for i, name in enumerate(names):
        words = [word.capitalize() for word in name.split("_")]
        camel = "".join(words)
        tasks = ((f"{name} in CamelCase?", camel), (f"{name} in capitals?", name.upper()),
                 (f"{camel} in snake_case?", name))
        if source == "example-more":
            tasks = ((f"{name} as a title?", " ".join(words)),
                     (f"{name} with hyphens?", name.replace("_", "-")))
        question, answer = tasks[i % len(tasks)]
        letters = [j for j, letter in enumerate(answer) if letter.isalpha()]
        j = letters[i * 7 % len(letters)]
        wrong = answer[:j] + answer[j].swapcase() + answer[j + 1:]
        yield f"{source}: record {i}", dict(prompt=question, response=answer, chosen=answer,
                                            rejected=wrong)


class SampleWriter:
    """Base class of the commands data.prepare.chat, pairs and prompts; run() does all the work.

    args: a SampleOptions that also has `tokenizer` (not for pairs), a source of open_chat_format().
    Subclasses set noun (the word for a sample in messages), model (a value of --model), and define

        encode(record)          return the encoded sample, a list whose first item is (ids, mask),
                                for split_by_prompt; or None, to leave the record out, after
                                counting the reason in self.notes; ValueError: an invalid record
        write_split(folder, split, samples)
                                write results of encode(); return {name: number}, for meta.json
    """
    suffix = ""  # of the default folder
    config = ""  # of the next command (default: that of the model type)

    def __init__(self, args):
        self.args = args
        source = args.tokenizer
        start = start_option(source)
        self.options = start or " --init_from CKPT.pt"  # of the next command
        if self.model == "chat" and start and not source.endswith(".pt"):
            self.config = "configs/finetune"
            self.options = f" --backbone {quote_path(source)}"
        self.tokenizer, block_size, template = open_chat_format(args.tokenizer)
        self.template = template or ChatTemplate()
        self.block_size = args.block_size or block_size or 512
        if block_size and self.model == "chat" and self.block_size > block_size:
            self.options += f" --block_size {self.block_size}"
        self.extra = {}  # keys of meta.json

    def run(self):
        """Run the command: write the folder of prepared samples and print a summary."""
        args = self.args
        name = source_name(args.sources[0]) + self.suffix
        out = args.out or os.path.join("data", "bin", name)
        if self.tokenizer.eot_token is None:
            raise DataError(f"a {self.tokenizer.kind} tokenizer has no end-of-text token to end an "
                            "answer with; start from a model with another tokenizer")
        self.template = self.template.with_end_ids(self.tokenizer)
        with new_folder(out, self.model, args.sources, args.force) as folder:
            splits = self.write(folder, self.read())
            write_meta(folder, Meta(
                self.model, **write_tokenizer(folder, self.tokenizer), block_size=self.block_size,
                template=self.template.spec, splits=splits, sources=args.sources,
                extra=self.extra))
        print(f"Prepared {out}: rows of up to {self.block_size} tokens")
        report(out, splits, self.config or f"configs/{self.model}", self.options)

    def write(self, folder, splits):
        """Write {split: results of encode()} to `folder`; return {split: {name: number}}."""
        return {split: self.write_split(folder, split, part) for split, part in splits.items()}

    def read(self):
        """Return the encoded records {"train": list, "val": list}, split by a hash of the prompt.

        Creates and prints self.notes, a Counter of notes on records. Raises DataError for
        unreadable sources, bad records (unless args.skip_bad) and an empty split.
        """
        args = self.args
        self.notes = Counter()
        sources = [example_records(source) if source in ("example", "example-more") else source
                   for source in args.sources]
        samples = parse_records(sources, self.encode, args.num_samples, args.skip_bad)
        splits = split_by_prompt([sample for sample in samples if sample is not None],
                                 args.val_fraction)
        for note, n in self.notes.items():
            print(f"{n:,} {self.noun}s {note}")
        if empty := [split for split, samples in splits.items() if not samples]:
            raise DataError(f"{', '.join(args.sources)}: no {self.noun} for {' and '.join(empty)}; "
                            "give more, a larger --block_size or a different --val_fraction")
        return splits

    def pad_tokens(self, ids, width):
        """Return sequences of ids as uint16 or uint32 (n, width), padded with the end of text."""
        dtype = id_dtype(self.tokenizer.n_vocab)
        return pad_rows(ids, width, self.tokenizer.eot_token, dtype)
