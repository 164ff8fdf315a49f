"""Text to token files: train.bin, val.bin and meta.json.

    python -m data.prepare my.txt notes/ more.jsonl --out data/bin/mine

sources.py finds and unpacks what is named here, encode.py makes tokens of it. The output is built
in a temporary folder and renamed: it is there whole or not at all.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import time
from importlib.util import find_spec
from types import SimpleNamespace

from data.meta import Meta, write_meta
from data.prepare import encode
from data.prepare.folders import new_folder, overwrite_problems
from data.prepare.sources import (
    CORPORA,
    MIRROR,
    STDLIB,
    download_corpus,
    find_files,
    shakespeare,
    source_name,
)
from data.records import is_saved, raise_problems
from data.rows import id_dtype
from data.token_files import open_shard
from data.tokenizer import MAX_VOCAB, CharTokenizer, write_tokenizer
from data.tokenizer_hf import find_tokenizer
from train.base.cli import run_command
from train.base.errors import DataError, UsageError, echo
from train.base.files import exclusive_lock

QUICK = 64 << 20        # bytes of text that one process reads, or cuts into bytes, in a second
QUICK_BPE = 8 << 20     # the same where words are cut into tokens
VAL_BYTES = 10_000_000  # enough text to validate on, however large the input
BPE_BYTES = 500_000_000  # of text that a tokenizer is made of
FILES = ("train.bin", "val.bin")


# --- all of it

def processes(num_proc, size, quick):
    """How many processes to use: as told, or as many cores as the size is worth."""
    if num_proc:
        return num_proc
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return 1 if size <= quick else min(len(allowed), size // encode.PIECE)


def check_settings(s):
    """(tokenizer or None, problems) of everything but the text itself. s: what `prepare` was asked
    for, here and below."""
    problems, loaded = overwrite_problems(s.out, "gpt", s.sources, s.force), None
    if s.val_fraction is not None and not 0 < s.val_fraction <= 0.5:
        problems.append(("val_fraction", f"{s.val_fraction} is not within 0 < F <= 0.5"))
    for name in ("num_proc", "num_samples"):
        if (value := getattr(s, name)) is not None and value < 1:
            problems.append((name, f"{value} is out of range; expected 1 or more"))
    if (s.tokenizer == "bpe") != (s.vocab_size is not None):
        problems.append(("vocab_size", "goes with tokenizer bpe, and with no other: give both"))
    elif s.vocab_size is not None and not 257 <= s.vocab_size <= MAX_VOCAB:
        problems.append(("vocab_size", f"{s.vocab_size} is out of range; expected 257 (bytes and "
                         f"end-of-text) to {MAX_VOCAB:,}"))
    if s.tokenizer == "bpe" and find_spec("rustbpe") is None:
        problems.append(("tokenizer bpe", "needs rustbpe: pip install rustbpe"))
    try:
        loaded = find_tokenizer(s.tokenizer) if s.tokenizer not in ("char", "bpe") else None
    except DataError as e:
        problems.append((str(e), ""))
    return loaded, problems


def survey_sources(s, folder):
    """(pieces with the sizes of their texts, tokenizer, copies, files passed over) after the first
    pass; DataError with all problems of settings and text."""
    loaded, problems = check_settings(s)
    unpacked = os.path.join(folder, "unpacked")
    os.mkdir(unpacked)
    files, copies, passed, wrong = find_files(s.sources, os.path.abspath(s.out), unpacked,
                                              s.fields, s.num_samples, s.separator)
    pieces, binary, unread = encode.cut_files(files)
    problems += wrong + unread
    size = sum(piece.size for piece in pieces)
    if size > QUICK:
        raise_problems(problems)  # below that, tell what is wrong in the text as well
    kept, chars, not_text, wrong = encode.survey(
        pieces, s.fields, s.tokenizer == "char", s.num_samples,
        1 if problems else processes(s.num_proc, size, QUICK))
    problems += wrong
    passed += binary + not_text
    folders = {source for source in s.sources if os.path.isdir(source) and not is_saved(source)}
    empty = folders - {p.file.folder for p in pieces if p.file.name not in not_text}
    empty -= {where for where, _ in problems}
    left = f"; passed over: {', '.join(passed[:3])}" if passed else ""
    problems += [(source, f"a folder without text files{left}") for source in sorted(empty)]
    total = sum(int(sizes.sum()) for _, sizes in kept)
    if total < 4 and not problems:
        problems = [(", ".join(s.sources), f"{total} characters of text; too little to split")]
    raise_problems(problems)
    if s.tokenizer == "bpe":
        loaded = encode.train_bpe(encode.sample_texts(kept, s.fields, BPE_BYTES), s.vocab_size)
    elif loaded is None:  # char; documents are parted by a newline
        several = sum(piece.closes * len(sizes) for piece, sizes in kept) > 1
        loaded = CharTokenizer("".join(sorted(chars | ({"\n"} if several else set()))))
    return kept, loaded, copies, passed


def write_tokens(s, kept, tokenizer, folder):
    """The second pass, into a temporary folder; the content of meta.json."""
    fraction = s.val_fraction or min(0.1, VAL_BYTES / sum(piece.size for piece, _ in kept))
    jobs, cut = encode.place(kept, fraction, s.num_samples)
    quick = QUICK if tokenizer.kind in ("byte", "char") else QUICK_BPE
    dtype = id_dtype(tokenizer.n_vocab)
    meta = Meta("gpt", dtype.name, **write_tokenizer(folder, tokenizer), sources=s.sources)
    write_meta(folder, meta)  # the workers read the tokenizer from this folder
    several = sum(job.piece.closes * len(job.sizes) for job in jobs) > 1
    newline = several and tokenizer.eot_token is None
    plan = encode.Plan(folder, s.fields, fraction, cut, dtype, newline)
    workers = processes(s.num_proc, sum(job.size for job in jobs), quick)
    splits = encode.write_splits(jobs, plan, workers)
    raise_problems([(", ".join(s.sources), f"{part['tokens']} token for {name}; too little text")
             for name, part in splits.items() if part["tokens"] < 2])
    meta.splits = splits
    meta.extra = {"fields": s.fields, "num_samples": s.num_samples,
                  "val": {"fraction": fraction, "by": "document" if cut is None else "tail"}}
    shutil.rmtree(os.path.join(folder, "unpacked"))
    write_meta(folder, meta)
    return meta.to_dict()


def prepare(sources, out, tokenizer="byte", val_fraction=None, field="text", num_proc=None,
            force=False, num_samples=None, vocab_size=None, separator=None, log=echo):
    """Writes train.bin, val.bin and meta.json of text files and folders to the folder `out`.

    tokenizer: byte, char, gpt2, bpe (of vocab_size), a rank file or a prepared folder.
    val_fraction: share of the text for validation; None: 0.1, at most 10 MB. field: of records, or
    a list of fields to join. num_proc: processes; None: by size. num_samples: documents to take;
    None: all. separator: the line that parts documents in text files, "": a blank one; None: a
    file is one. Returns the content of meta.json; DataError with all problems in one message.
    """
    start = time.monotonic()
    s = SimpleNamespace(
        sources=[os.path.expanduser(source) for source in sources], out=os.path.expanduser(out),
        tokenizer=tokenizer, val_fraction=val_fraction, num_proc=num_proc, force=force,
        fields=[field] if isinstance(field, str) else list(field), num_samples=num_samples,
        vocab_size=vocab_size, separator=separator)
    with new_folder(s.out, "|".join(map(re.escape, FILES))) as folder:
        kept, loaded, copies, passed = survey_sources(s, folder)
        meta = write_tokens(s, kept, loaded, folder)
    report_prepared(meta, s.out, copies, passed, time.monotonic() - start, log)
    return meta


def next_command(tokens, out):
    """How to train on `tokens` in `out` here: the first run, or the production run where data and
    machine are large enough for it."""
    gpu = shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia/version")
    config = "config.yaml" if gpu and tokens >= 100e6 else "config_quick.yaml"
    run = os.path.join("out", os.path.basename(os.path.abspath(out)))
    return (f"python run_train.py --config train/{config} --data_dir {shlex.quote(out)} "
            f"--out_dir {shlex.quote(run)}")


def report_prepared(meta, out, copies, passed, seconds, log):
    """Says what is in `out` and what to do next."""
    kind, splits = meta["tokenizer"]["kind"], meta["splits"]
    share = splits["val"]["bytes"] / max(splits["train"]["bytes"] + splits["val"]["bytes"], 1)
    part = "documents drawn by a hash" if meta["val"]["by"] == "document" else "its end"
    log(f"Prepared {out} in {seconds:.1f} s: {kind} tokens, vocabulary {meta['vocab_size']:,}; "
        f"validation on {100 * share:.3g}% of the text, {part}")
    log(f"       {'documents':>12} {'tokens':>16} {'bytes':>16}  bytes per token")
    for name, n in splits.items():
        log(f"{name:6} {n['documents']:12,} {n['tokens']:16,} {n['bytes']:16,} "
            f"{n['bytes'] / n['tokens']:16.2f}")
    for names, what in ((copies, "that are copies of others"), (passed, "that are not text")):
        if names:
            more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
            log(f"Passed over {len(names):,} files {what}: {', '.join(names[:5])}{more}")
    if kind == "byte":
        log("Fewer, longer tokens: --tokenizer gpt2 (downloads 0.8 MB once)")
    log(f"Next: {next_command(splits['train']['tokens'], out)}")


def is_prepared(folder):
    """Return whether `folder` contains token files."""
    return os.path.isdir(folder) and any(
        name.endswith((".bin", ".npy")) for name in os.listdir(folder))


def ensure_dataset(data_dir, log=echo):
    """Prepares the built-in dataset that a missing `data_dir` names (its last part is stdlib) and
    leaves anything else alone. Safe in several processes at once. Returns whether it did so."""
    if os.path.basename(os.path.normpath(data_dir)) != "stdlib":
        return False
    if is_prepared(data_dir):
        return False
    start = time.monotonic()
    try:
        os.makedirs(data_dir, exist_ok=True)
        with exclusive_lock(data_dir):
            if is_prepared(data_dir):  # by another process meanwhile
                return False
            meta = prepare([STDLIB], data_dir, log=lambda line: None)
    except OSError as e:
        raise DataError(f"{data_dir}: cannot be prepared: {e}; choose another data_dir") from None
    tokens = sum(part["tokens"] for part in meta["splits"].values())
    log(f"Prepared {data_dir} from the Python standard library of this machine: {tokens:,} byte "
        f"tokens in {time.monotonic() - start:.1f} s")
    return True


# --- the command line

SOURCES = """text files (.txt, .md, .py, ...: one document each); records (.jsonl, .json, .csv,
.tsv, .parquet: one document each); any of these as .gz; folders of them; - for standard input; a
folder saved by Hugging Face's datasets, or hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT of its
hub, streamed. All UTF-8"""
TOKENIZERS = """byte (any text, 257 tokens), char (a token for each character of the text), gpt2
(50,257 tokens; 0.8 MB downloaded once), bpe (learned from the text, with --vocab_size; needs
rustbpe), a rank file in tiktoken's format, or a prepared folder to share its tokenizer (default:
byte)"""
DATASETS = """stdlib (of this Python), shakespeare (1.1 MB), fineweb10B and fineweb_edu (20 GB of
GPT-2's tokens each, ready to train on), openwebtext (24 GB), tinystories (2.2 GB). Downloaded once,
and gone on with where it was cut. Files are checked by the sha256 that Hugging Face sends with
them; what came is kept in SHA256SUMS and compared at the next run"""


def check_arguments(args):
    """DataError for arguments that do not go together."""
    if bool(args.sources) == bool(args.dataset):
        raise UsageError("give one or more SOURCEs, or --dataset NAME")
    if args.input and args.dataset != "shakespeare":
        raise UsageError("--input goes with --dataset shakespeare")
    if (args.mirror or args.shards is not None) and args.dataset not in CORPORA:
        raise UsageError(f"--mirror and --shards go with --dataset {', '.join(CORPORA)}")
    if args.mirror and not re.match(MIRROR, args.mirror):
        raise UsageError(f"--mirror {args.mirror}: expected https:// or file://: what comes over "
                         "http:// can be anybody's")
    if args.shards is not None and args.shards < 1:
        raise UsageError("--shards: expected 1 or more")


def prepare_corpus(args, out, log=echo):
    """A corpus that comes as GPT-2's tokens: downloads its shards into `out`, with a meta.json."""
    corpus, start = CORPORA[args.dataset], time.monotonic()
    if (args.field or args.separator is not None or args.num_samples or args.val_fraction
            or args.vocab_size):
        raise DataError(f"dataset {args.dataset}: comes as tokens, already split; of these options "
                        "only --shards, --mirror, --out and --tokenizer FILE apply")
    tokenizer = find_tokenizer(args.tokenizer or "gpt2")
    if tokenizer.kind != "gpt2":
        raise DataError(f"dataset {args.dataset}: its tokens are GPT-2's; --tokenizer can only "
                        "name a copy of gpt2's rank file")
    raise_problems(overwrite_problems(out, "gpt", [corpus.url], args.force))
    os.makedirs(out, exist_ok=True)
    for name in FILES[:2]:  # of other sources (--force): they would be taken for all there is
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(out, name))
    meta = Meta("gpt", "uint16", **write_tokenizer(out, tokenizer), sources=[corpus.url])
    write_meta(out, meta)  # before the shards: what was begun can be gone on with
    paths = download_corpus(args.dataset, out, args.mirror, args.shards)
    counts = [open_shard(path, "uint16").n_tokens for path in paths]
    log(f"Prepared {out} in {time.monotonic() - start:.1f} s: gpt2 tokens, {counts[0]:,} for "
        f"validation, {sum(counts[1:]):,} in {len(counts) - 1} training files")
    log(f"Next: {next_command(sum(counts[1:]), out)}")


def run(args):
    """What the command line asks for."""
    check_arguments(args)
    name, sources, separator = args.dataset, args.sources, args.separator
    default = os.path.join("data", "bin", name or source_name(sources[0]))
    out = os.path.expanduser(args.out or default)
    if name in CORPORA and CORPORA[name].tokens:
        return prepare_corpus(args, out)
    if name in CORPORA:
        folder = f"{out}.download"
        sources = download_corpus(name, folder, args.mirror, args.shards)
        separator = CORPORA[name].separator if separator is None else separator
        echo(f"Downloaded to {folder}; it can go once the tokens are made")
    elif name:
        sources = [STDLIB if name == "stdlib" else shakespeare(args.input)]
    prepare(sources, out, args.tokenizer or "byte", args.val_fraction, args.field or "text",
            args.num_proc, args.force, args.num_samples, args.vocab_size, separator)


def main(argv=None):
    """Runs the command; its exit code: 2 for a problem, 130 for Ctrl-C."""
    p = argparse.ArgumentParser(
        "python -m data.prepare", allow_abbrev=False,
        description="Turn text into token files: train.bin, val.bin and meta.json.")
    p.add_argument("sources", nargs="*", metavar="SOURCE", help=SOURCES)
    p.add_argument("--out", metavar="FOLDER", help="where to write (default: data/bin/ and the "
                   "name of the first source)")
    p.add_argument("--force", action="store_true",
                   help="replace what a folder holds from other sources")
    p.add_argument("--num_proc", type=int, metavar="N",
                   help="processes (default: as many cores as the size is worth)")
    add = p.add_argument_group("the text").add_argument
    add("--field", action="append", metavar="NAME", help="field of records that holds the text "
        "(default: text); given several times, the fields are joined by newlines")
    add("--separator", metavar="LINE", help="the line that parts documents in text files; \"\": "
        "blank lines (default: a file is one document)")
    add("--num_samples", type=int, metavar="N", help="take the first N documents only")
    add("--val_fraction", type=float, metavar="F", help="share of the text for validation: "
        "documents drawn by a hash, or where these are few the end of the text (default: 0.1, but "
        "at most 10 MB)")
    add = p.add_argument_group("its tokens").add_argument
    add("--tokenizer", metavar="NAME", help=TOKENIZERS)
    add("--vocab_size", type=int, metavar="N",
        help="tokens of --tokenizer bpe, end-of-text included")
    add = p.add_argument_group("known text, instead of sources").add_argument
    add("--dataset", choices=("stdlib", "shakespeare", *CORPORA), help=DATASETS)
    add("--shards", type=int, metavar="N", help="the first N training files of a dataset only")
    add("--mirror", metavar="URL", help="an https:// or file:// folder with the same files")
    add("--input", metavar="FILE", help="with --dataset shakespeare: a copy of it, so that nothing "
        "is downloaded")
    return run_command(p, run, argv, "interrupted; no tokens were written")
