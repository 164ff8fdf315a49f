"""Text to token files: train.bin, val.bin and meta.json.

    python -m data.prepare my.txt notes/ more.jsonl --out data/bin/mine

sources.py finds the sources and copies the text of all documents to one file, encode.py splits and
encodes it. The files are written to a temporary folder and moved at the end (folders.py).
"""

import os
import re
import shlex
import shutil
import time
from dataclasses import dataclass, replace

from data.hub import TRUSTED_URL
from data.meta import Meta, write_meta
from data.prepare import encode
from data.prepare.corpora import CORPORA, download_corpus, prepare_tokens, shakespeare
from data.prepare.folders import new_folder, overwrite_problems
from data.prepare.sources import STDLIB, read_sources, source_name
from data.records import raise_problems
from data.rows import id_dtype
from data.tokenizer import MAX_VOCAB, CharTokenizer, open_tokenizer, write_tokenizer
from train.base.cli import run_command
from train.base.errors import DataError, UserError, echo, require
from train.base.fields import key
from train.base.files import exclusive_lock

# Bytes of text that one process encodes in about a second; more are distributed.
QUICK_BYTES = 64 << 20      # as bytes or characters
QUICK_BPE_BYTES = 8 << 20   # by byte pair encoding
MAX_VAL_BYTES = 10_000_000  # of the validation split by default
BPE_BYTES = 500_000_000     # of the text from which a tokenizer is trained
FILES = r"(train|val)\.bin"


@dataclass
class Options:
    """Turn text into token files: train.bin, val.bin and meta.json."""
    sources: list[str] = key(
        [], "text files (.txt, .md, .py, ...: one document each); records (.jsonl, .json, .csv, "
        ".tsv, .parquet: one document each); any of these as .gz; folders of them; - for standard "
        "input; a folder saved by Hugging Face's datasets, or hf:NAME, hf:NAME:CONFIG or "
        "hf:NAME:CONFIG:SPLIT of its hub, streamed. All UTF-8", positional=True, text=True,
        metavar="SOURCE")
    out: str = key("", "where to write (default: data/bin/ and the name of the first source)",
                   metavar="FOLDER")
    force: bool = key(False, "replace data from other sources in that folder")
    num_proc: int | None = key(None, "number of processes (default: by the size of the text)",
                              ge=1)
    field: list[str] = key(
        [], "field of records with the text (default: text); if given several times, the fields "
        "are joined by newlines", group="text", text=True)
    separator: str = key(
        None, "the line between documents in text files; \"\": blank lines (default: a file is one "
        "document)", group="text", metavar="LINE")
    num_samples: int | None = key(None, "use the first N documents only", group="text",
                                 ge=1)
    val_fraction: float | None = key(
        None, "fraction of the text for validation: documents chosen by a hash, or the end of the "
        "text if there are few (default: 0.1, at most 10 MB)", group="text", gt=0, le=0.5)
    tokenizer: str = key(
        "", "byte (any text, 257 tokens), char (one token per character), gpt2 (50,257 tokens; 0.8 "
        "MB downloaded once), bpe (trained on the text, with --vocab_size; needs rustbpe), a rank "
        "file in tiktoken's format, or a prepared folder, Hugging Face model or checkpoint with "
        "the same tokenizer (default: byte)", group="tokens", metavar="NAME")
    vocab_size: int | None = key(None, "tokens of --tokenizer bpe, including the end of text",
                                 group="tokens", ge=257, le=MAX_VOCAB)
    dataset: str = key(
        "", "stdlib (of this Python), shakespeare (1.1 MB), fineweb10B and fineweb_edu (20 GB of "
        "GPT-2's tokens each, ready to train on), openwebtext (24 GB), tinystories (2.2 GB); the "
        "last four need the package huggingface_hub", group="known text, instead of sources",
        choices=("", "stdlib", "shakespeare", *CORPORA))
    shards: int | None = key(None, "the first N training files of a dataset only", ge=1,
                             group="known text, instead of sources")
    mirror: str = key("", "https:// address of a mirror of huggingface.co", metavar="URL",
                      group="known text, instead of sources")
    input: str = key("", "with --dataset shakespeare: a copy of it; nothing is downloaded",
                     group="known text, instead of sources", metavar="FILE")


# -----------------------------------------------------------------------------
# preparing text

def count_processes(num_proc, size, quick_bytes):
    """Return `num_proc`, or by default one process per core if the text is large enough."""
    if num_proc:
        return num_proc
    if size <= quick_bytes:
        return 1
    cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return min(len(cores), size // encode.PIECE_BYTES)


def choose_tokenizer(o):
    """Return (tokenizer or `None` if it is made from the text, problems)."""
    problems = []
    if (o.tokenizer == "bpe") != (o.vocab_size is not None):
        problems.append(("vocab_size", "goes with tokenizer bpe, and with no other: give both"))
    try:
        if o.tokenizer == "bpe":
            require("rustbpe", "tokenizer bpe")
        return None if o.tokenizer in ("char", "bpe") else open_tokenizer(o.tokenizer), problems
    except ValueError as error:
        return None, [*problems, (str(error), "")]


def make_tokenizer(o, documents):
    """Return a tokenizer made from the text: char or bpe."""
    if o.tokenizer == "bpe":
        return encode.train_bpe(encode.sample_texts(documents, BPE_BYTES), o.vocab_size)
    separator = {"\n"} if len(documents.ends) > 1 else set()
    return CharTokenizer("".join(sorted(documents.chars | separator)))


def write_tokens(o, documents, tokenizer, folder):
    """Write the token files to `folder` and return the Meta."""
    fraction = o.val_fraction or min(0.1, MAX_VAL_BYTES / documents.size)
    in_val, cut = encode.choose_split(documents, fraction)
    meta = Meta("gpt", id_dtype(tokenizer.n_vocab).name, **write_tokenizer(folder, tokenizer),
                sources=o.sources)
    write_meta(folder, meta)  # worker processes read the tokenizer from this folder
    newline = len(documents.ends) > 1 and tokenizer.eot_token is None
    quick_bytes = QUICK_BYTES if tokenizer.kind in ("byte", "char") else QUICK_BPE_BYTES
    try:
        meta.splits = encode.write_splits(
            encode.cut_pieces(documents, in_val, cut), folder, documents.size, newline,
            count_processes(o.num_proc, documents.size, quick_bytes))
    except DataError as error:
        raise DataError(f"{', '.join(o.sources)[:200]}: {error}") from None
    raise_problems([(", ".join(o.sources), f"{part['tokens']} token for {name}; too little text")
                    for name, part in meta.splits.items() if part["tokens"] < 2])
    by = "document" if cut == documents.size else "tail"
    meta.extra = {"fields": o.field, "num_samples": o.num_samples,
                  "val": {"fraction": fraction, "by": by}}
    os.unlink(documents.path)
    write_meta(folder, meta)
    return meta


def prepare(sources, out, tokenizer="byte", log=echo, **options):
    """Write train.bin, val.bin and meta.json of `sources` to the folder `out`, and return the
    content of meta.json. options: fields of Options. Raises DataError with all problems."""
    start = time.monotonic()
    o = Options([os.path.expanduser(source) for source in sources], os.path.expanduser(out),
                tokenizer=tokenizer or "byte", **options)
    o.field = [o.field] if isinstance(o.field, str) else list(o.field) or ["text"]
    tokenizer, problems = choose_tokenizer(o)
    problems += overwrite_problems(o.out, "gpt", o.sources, o.force)
    with new_folder(o.out, FILES) as folder:
        documents, copies, skipped = read_sources(o, os.path.join(folder, encode.TEXT), problems)
        if documents.size < 4:
            raise DataError(f"{', '.join(o.sources)}: {documents.size} bytes of text; too little "
                            "to split")
        meta = write_tokens(o, documents, tokenizer or make_tokenizer(o, documents), folder)
    report(meta, o.out, copies, skipped, time.monotonic() - start, log)
    return meta.to_dict()


def report(meta, out, copies, skipped, seconds, log):
    """Print a summary of the folder `out` and the next command."""
    splits = meta.splits
    share = splits["val"]["bytes"] / max(splits["train"]["bytes"] + splits["val"]["bytes"], 1)
    part = "documents by hash" if meta.extra["val"]["by"] == "document" else "its end"
    tokenizer = meta.tokenizer["kind"]
    log(f"Prepared {out} in {seconds:.1f} s: {tokenizer} tokens, vocabulary {meta.vocab_size:,}; "
        f"validation on {100 * share:.3g}% of the text, {part}")
    log(f"       {'documents':>12} {'tokens':>16} {'bytes':>16}  bytes per token")
    for name, n in splits.items():
        log(f"{name:6} {n['documents']:12,} {n['tokens']:16,} {n['bytes']:16,} "
            f"{n['bytes'] / n['tokens']:16.2f}")
    for names, kind in ((copies, "duplicate"), (skipped, "non-text")):
        if names:
            more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
            log(f"Skipped {len(names):,} {kind} files: {', '.join(names[:5])}{more}")
    if tokenizer == "byte":
        log("Fewer, longer tokens: --tokenizer gpt2 (downloads 0.8 MB once)")
    log(f"Next: {next_command(splits['train']['tokens'], out)}")


def next_command(tokens, out):
    """Return the command that trains on `tokens` in `out`: with the production configuration if
    data and machine are large enough, or with that of the first run."""
    gpu = shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia/version")
    config = "config.yaml" if gpu and tokens >= 100e6 else "config_quick.yaml"
    run_folder = os.path.join("out", os.path.basename(os.path.abspath(out)))
    return (f"python run_train.py --config train/{config} --data_dir {shlex.quote(out)} "
            f"--out_dir {shlex.quote(run_folder)}")


# -----------------------------------------------------------------------------
# built-in data

def is_prepared(folder):
    """Return whether `folder` contains token files."""
    return os.path.isdir(folder) and any(
        name.endswith((".bin", ".npy")) for name in os.listdir(folder))


def ensure_dataset(data_dir, log=echo):
    """Prepare the built-in data if `data_dir` is missing and has the name "stdlib". Several
    processes may do this at once. Returns whether data were prepared."""
    if os.path.basename(os.path.normpath(data_dir)) != "stdlib" or is_prepared(data_dir):
        return False
    start = time.monotonic()
    try:
        os.makedirs(data_dir, exist_ok=True)
        with exclusive_lock(data_dir):
            if is_prepared(data_dir):  # by a second process in the meantime
                return False
            meta = prepare([STDLIB], data_dir, log=lambda line: None)
    except OSError as error:
        raise DataError(f"{data_dir}: cannot be prepared: {error}; choose another data_dir"
                        ) from None
    tokens = sum(part["tokens"] for part in meta["splits"].values())
    log(f"Prepared {data_dir} from the Python standard library of this machine: {tokens:,} byte "
        f"tokens in {time.monotonic() - start:.1f} s")
    return True


# -----------------------------------------------------------------------------
# the command line

def check_arguments(o):
    """Raise UserError for options that contradict each other."""
    if bool(o.sources) == bool(o.dataset):
        raise UserError("give one or more SOURCEs, or --dataset NAME")
    if o.input and o.dataset != "shakespeare":
        raise UserError("--input goes with --dataset shakespeare")
    if (o.mirror or o.shards is not None) and o.dataset not in CORPORA:
        raise UserError(f"--mirror and --shards go with --dataset {', '.join(CORPORA)}")
    if o.mirror and not re.match(TRUSTED_URL, o.mirror):
        raise UserError(f"--mirror {o.mirror}: expected https://")
    if o.dataset in CORPORA and CORPORA[o.dataset].tokens and (
            o.field or o.separator is not None or o.num_samples or o.val_fraction or o.vocab_size):
        raise DataError(f"dataset {o.dataset}: comes as tokens, already split; of these options "
                        "only --shards, --mirror, --out and --tokenizer FILE apply")


def run(o):
    """Run the command."""
    check_arguments(o)
    default = os.path.join("data", "bin", o.dataset or source_name(o.sources[0]))
    o = replace(o, out=os.path.expanduser(o.out or default))
    corpus = CORPORA.get(o.dataset)
    if corpus and corpus.tokens:
        n_tokens = prepare_tokens(o.dataset, o.out, o.tokenizer, o.mirror, o.shards, o.force, echo)
        echo(f"Next: {next_command(n_tokens, o.out)}")
        return
    if corpus:
        o.sources = download_corpus(o.dataset, o.mirror, o.shards)
        o.separator = corpus.separator if o.separator is None else o.separator
    elif o.dataset:
        o.sources = [STDLIB if o.dataset == "stdlib" else shakespeare(o.input)]
    prepare(**vars(o))


def main(argv=None):
    """Run the command and return the exit code."""
    return run_command(Options, run, argv, "interrupted; no tokens were written")
