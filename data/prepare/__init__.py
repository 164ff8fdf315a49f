"""Turn text into token files: train.bin, val.bin and meta.json.

    python -m data.prepare my.txt notes/ more.jsonl --out data/bin/mine

sources.py finds the sources and copies the text of all documents to one file, encode.py splits and
encodes it. The files are written to a temporary folder and moved at the end (folders.py).
"""

import os
import shutil
import time
from dataclasses import dataclass

from data.meta import Meta, is_prepared, write_meta
from data.prepare import encode
from data.prepare.corpora import CORPORA, download_shakespeare, prepare_tokens
from data.prepare.folders import FolderOptions, new_folder, report
from data.prepare.sources import STDLIB, read_sources, source_name
from data.records import SOURCES
from data.rows import id_dtype
from data.tokenizer import open_tokenizer, write_tokenizer
from data.tokenizer_types import MAX_VOCAB, CharTokenizer
from train.base.cli import command
from train.base.errors import DataError, UserError, echo
from train.base.fields import key
from train.base.files import exclusive_lock

MAX_VAL_BYTES = 10_000_000  # of the validation split by default
BPE_BYTES = 500_000_000     # of the text from which a tokenizer is trained


@dataclass
class PrepareOptions(FolderOptions):
    """Turn text into token files: train.bin, val.bin and meta.json."""
    sources: list[str] = key([], f"text, one document per file; records: {SOURCES}; folders of "
                             "text", positional=True, metavar="SOURCE")
    field: list[str] = key([], "field of records with the text (default: text); the texts of "
                           "several fields are joined by newlines", text=True)
    num_samples: int | None = key(None, "use the first N documents only", ge=1)
    val_fraction: float | None = key(
        None, "fraction of the text for validation: documents chosen by a hash, or the end of the "
        "text if there are few (default: 0.1, at most 10 MB)", gt=0, le=0.5)
    tokenizer: str = key(
        "", "byte (any text), char (one token per character), gpt2, bpe (trained on the text), a "
        "rank file in tiktoken's format, or a prepared folder, a Hugging Face model or checkpoint "
        "with the same tokenizer (default: byte)", metavar="NAME")
    vocab_size: int | None = key(None, "tokens of bpe, with the end of text", ge=257, le=MAX_VOCAB)
    dataset: str = key("", "known text, instead of sources; fineweb10B and fineweb_edu are GPT-2's "
                       "tokens", choices=("stdlib", "shakespeare", *CORPORA))
    shards: int | None = key(None, "the first N training files of a dataset only", ge=1)


# -----------------------------------------------------------------------------
# preparing text

def make_tokenizer(o, documents):
    """Return a bpe or char tokenizer made from the text of `documents`, a Documents.

    bpe: up to o.vocab_size tokens, trained on about BPE_BYTES (500 MB) of text or less.
    char: all characters and, with several documents, the newline that is written after each.
    """
    if o.tokenizer == "bpe":
        return encode.train_bpe(encode.sample_texts(documents, BPE_BYTES), o.vocab_size)
    chars = set("\n" if len(documents.ends) > 1 else "")
    for text in encode.sample_texts(documents, documents.size):
        chars.update(text)
    return CharTokenizer("".join(sorted(chars)))


def prepare(sources, out, tokenizer="byte", **options):
    """Write train.bin, val.bin and meta.json to the folder `out`; return the content of meta.json.

    sources: names of files, folders or data sets. tokenizer, options: fields of PrepareOptions.
    Raises UserError for sources that cannot be read, encoded or divided, for vocab_size without bpe
    and bpe without it, and the errors of open_tokenizer and new_folder.
    """
    start = time.monotonic()
    o = PrepareOptions(sources=[os.path.expanduser(source) for source in sources],
                       out=os.path.expanduser(out), tokenizer=tokenizer or "byte", **options)
    if (o.tokenizer == "bpe") != (o.vocab_size is not None):
        raise UserError("--vocab_size goes with --tokenizer bpe, and with no other: give both")
    with new_folder(o.out, "gpt", o.sources, o.force) as folder:
        tokenizer = None if o.tokenizer in ("char", "bpe") else open_tokenizer(o.tokenizer)
        documents, skipped = read_sources(o, os.path.join(folder, "text"))
        tokenizer = tokenizer or make_tokenizer(o, documents)
        fraction = o.val_fraction or min(0.1, MAX_VAL_BYTES / documents.size)
        in_val, cut = encode.choose_split(documents, fraction)
        if not cut:  # its first character has almost all bytes
            raise DataError(f"{', '.join(o.sources)}: {documents.size} bytes of text; too little "
                            "to split")
        splits = encode.write_splits(folder, documents, tokenizer, in_val, cut)
        val = {"fraction": fraction, "by": "document" if cut == documents.size else "tail"}
        meta = Meta("gpt", id_dtype(tokenizer.n_vocab).name, **write_tokenizer(folder, tokenizer),
                    splits=splits, sources=o.sources,
                    extra={"fields": o.field or ["text"], "num_samples": o.num_samples, "val": val})
        os.unlink(documents.path)
        write_meta(folder, meta)
    if skipped:
        echo(f"Skipped {len(skipped):,} files that are no text or copies, e.g. "
             f"{', '.join(skipped[:5])}")
    echo(f"Prepared {o.out} in {time.monotonic() - start:.1f} s")
    return meta.to_dict()


def report_text(out, splits):
    """Print `splits`, {split: {name: number}}, and the command that trains on the folder `out`."""
    gpu = shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia/version")
    is_large = gpu and splits["train"]["tokens"] >= 100e6
    report(out, splits, "config" if is_large else "config_quick")


# -----------------------------------------------------------------------------
# built-in data

def ensure_dataset(data_dir):
    """Prepare Python's standard library in the folder data_dir, unless it has prepared tokens.

    Several processes may call this at once: the first prepares, the others wait. Raises UserError
    if data_dir cannot be written, has other files, or has a damaged meta.json.
    """
    try:
        os.makedirs(data_dir, exist_ok=True)
        with exclusive_lock(data_dir):
            if is_prepared(data_dir):
                return
            echo("Preparing this machine's Python standard library...")
            prepare([STDLIB], data_dir)
    except OSError as error:
        raise DataError(f"{data_dir}: not prepared: {error}; choose another data_dir") from None


# -----------------------------------------------------------------------------
# the command line

def run(o):
    """Run the command: prepare o.sources or o.dataset in the folder o.out and print a summary."""
    if bool(o.sources) == bool(o.dataset):
        raise UserError("give one or more SOURCEs, or --dataset NAME")
    o.out = o.out or os.path.join("data", "bin", o.dataset or source_name(o.sources[0]))
    if o.dataset and o.dataset not in CORPORA:
        o.sources = [STDLIB if o.dataset == "stdlib" else download_shakespeare()]
    splits = prepare_tokens(o) if o.dataset in CORPORA else prepare(**vars(o))["splits"]
    report_text(o.out, splits)


main = command(PrepareOptions, run, interrupt_message="interrupted; no tokens were written")
