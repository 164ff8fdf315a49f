"""Text, JSONL, source files and folders to token files: train.bin, val.bin and meta.json.

    python -m data.prepare my.txt notes/ more.jsonl --out data/bin/mine

The output is built in a temporary folder and renamed: it is there whole or not at all.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path

from data.download import download, sha256, write_atomically
from data.encode import SHOWN, Plan, place, survey, write_splits
from data.text import PIECE, STDLIB, find_pieces
from data.tokenizer import CharTokenizer, load_tokenizer

RANKS_FILE = "tokenizer.tiktoken"
FILES = ("train.bin", "val.bin", RANKS_FILE, "meta.json")
VAL_BYTES = 10_000_000  # enough text to validate on, however large the input
QUICK = 64 << 20        # bytes of text that one process reads, or cuts into bytes, in a second
QUICK_BPE = 8 << 20     # the same where words are cut into tokens
SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


# --- the output folder

def old_meta(out):
    """meta.json of a folder that this command wrote, else None."""
    try:
        with open(os.path.join(out, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        return meta if isinstance(meta.get("sources"), list) else None
    except (OSError, ValueError, AttributeError):
        return None


def check_out(out, sources, force):
    """What forbids writing to the folder `out`, or None."""
    if os.path.exists(out) and not os.path.isdir(out):
        return f"{out}: is a file; --out names a folder"
    if force or not os.path.isdir(out) or not os.listdir(out):
        return None
    meta, escape = old_meta(out), "name another folder with --out, or replace it with --force"
    if meta is None:
        return f"{out}: holds files that this command did not write; {escape}"
    if meta["sources"] != sources:
        return f"{out}: was prepared from {', '.join(map(str, meta['sources']))[:200]}; {escape}"
    return None


def temporary_folder(out):
    """A new folder beside `out`, on the same disk; clears what runs killed an hour ago left."""
    parent, name = os.path.split(os.path.abspath(out))
    os.makedirs(parent, exist_ok=True)
    for left in Path(parent).glob(f".{name}.tmp-*"):
        if time.time() - max(p.stat().st_mtime for p in [left, *left.iterdir()]) > 3600:
            shutil.rmtree(left, ignore_errors=True)
    folder = os.path.join(parent, f".{name}.tmp-{secrets.token_hex(4)}")
    os.mkdir(folder)
    return folder


def publish(folder, out, meta):
    """Makes the finished `folder` the folder `out`."""
    try:
        os.rename(folder, out)  # also where `out` is an empty folder
        return
    except OSError:
        if not os.path.isdir(out):
            raise
    if old_meta(out) == meta and all(os.path.exists(os.path.join(out, name)) for name in FILES[:2]):
        shutil.rmtree(folder)  # the same is there already, perhaps since a moment ago
        return
    # Only our own files are replaced, never the folder. train.bin goes first and comes last: in
    # between nothing takes the folder for a complete one.
    for name in FILES:
        if os.path.exists(os.path.join(out, name)):
            os.unlink(os.path.join(out, name))
    for name in reversed(FILES):
        if os.path.exists(os.path.join(folder, name)):
            os.replace(os.path.join(folder, name), os.path.join(out, name))
    os.rmdir(folder)


def write_meta(folder, meta):
    with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=1)
        f.write("\n")


def write_tokenizer(folder, tokenizer):
    """Writes what rebuilds the tokenizer; its entry in meta.json, which only refers to ranks."""
    spec = tokenizer.spec()
    if "ranks" in spec:
        with open(os.path.join(folder, RANKS_FILE), "w", encoding="ascii", newline="\n") as f:
            f.write(spec.pop("ranks"))
        spec["ranks_file"] = RANKS_FILE
    write_meta(folder, {"tokenizer": spec})
    return spec


# --- the work

def processes(num_proc, size, quick):
    """How many processes to use: as told, or as many cores as the size is worth."""
    if num_proc:
        return num_proc
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return 1 if size <= quick else min(len(allowed), size // PIECE)


def check_settings(out, sources, tokenizer, val_fraction, num_proc, force):
    """(tokenizer or None, problems) of everything but the text itself."""
    problems = [check_out(out, sources, force)]
    if val_fraction is not None and not 0 < val_fraction <= 0.5:
        problems.append(f"val_fraction: {val_fraction} is out of range; expected 0 < F <= 0.5")
    if num_proc is not None and num_proc < 1:
        problems.append(f"num_proc: {num_proc} is out of range; expected 1 or more")
    loaded = None
    try:
        loaded = load_tokenizer(tokenizer) if tokenizer != "char" else None
    except ValueError as e:
        problems.append(str(e))
    return loaded, [p for p in problems if p]


def stop_at(problems):
    """Raises ValueError with all the problems in one message, if there are any."""
    if problems:
        more = ["... and more"] if len(problems) > SHOWN else []
        raise ValueError("\n  - ".join([f"{len(problems)} problems", *problems[:SHOWN], *more])
                         if len(problems) > 1 else problems[0])


def inspect(sources, out, tokenizer, val_fraction, field, num_proc, force):
    """(kept pieces with their sizes, tokenizer, files passed over) after the first pass; ValueError
    with all problems of settings and text."""
    pieces, skipped, problems = find_pieces(sources, os.path.abspath(out))
    loaded, wrong = check_settings(out, sources, tokenizer, val_fraction, num_proc, force)
    problems += wrong
    size = sum(piece.size for piece in pieces)
    if size > QUICK:
        stop_at(problems)  # below that, tell what is wrong in the text as well
    kept, chars, not_text, wrong = survey(pieces, field, tokenizer == "char",
                                          1 if problems else processes(num_proc, size, QUICK))
    empty = {piece.folder for piece in pieces} - {piece.folder for piece, _ in kept} - {""}
    problems += wrong + [f"{folder}: a folder without text files" for folder in sorted(empty)]
    total = sum(int(sizes.sum()) for _, sizes in kept)
    if total < 4 and not problems:
        problems = [f"{', '.join(sources)}: {total} characters of text; too little to split in two"]
    stop_at(problems)
    if loaded is None:  # char; documents are parted by a newline
        loaded = CharTokenizer("".join(sorted(chars | set("\n" if documents(kept) > 1 else ""))))
    return kept, loaded, skipped + not_text


def documents(kept):
    return sum(len(sizes) for piece, sizes in kept if piece.closes)


def write(kept, tokenizer, sources, out, fraction, field, num_proc):
    """The second pass, into a temporary folder that becomes `out`; the content of meta.json."""
    jobs, cut = place(kept, fraction)
    quick = QUICK if tokenizer.kind in ("byte", "char") else QUICK_BPE
    dtype = "uint16" if tokenizer.n_vocab <= 65536 else "uint32"
    folder = temporary_folder(out)
    try:
        spec = write_tokenizer(folder, tokenizer)
        plan = Plan(folder, field, fraction, cut, dtype,
                    newline=tokenizer.eot_token is None and documents(kept) > 1)
        splits = write_splits(jobs, plan, processes(num_proc, sum(j.size for j in jobs), quick))
        stop_at([f"{', '.join(sources)}: {part['tokens']} token for {name}; too little text"
                 for name, part in splits.items() if part["tokens"] < 2])
        meta = {"format_version": 1, "dtype": dtype, "vocab_size": tokenizer.n_vocab,
                "tokenizer": spec, "eot_token": tokenizer.eot_token, "splits": splits,
                "sources": sources,
                "val": {"fraction": fraction, "by": "document" if cut is None else "tail"}}
        write_meta(folder, meta)
        publish(folder, out, meta)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return meta


def prepare(sources, out, tokenizer="byte", val_fraction=None, field="text", num_proc=None,
            force=False, log=print):
    """Writes train.bin, val.bin and meta.json of text files and folders to the folder `out`.

    tokenizer: byte, char, gpt2, a rank file or a prepared folder. val_fraction: share of the text
    for validation; None: 0.1, at most 10 MB. field: of JSONL records. num_proc: processes; None: by
    size. Returns the content of meta.json; ValueError with all problems in one message.
    """
    start, out = time.monotonic(), os.fspath(out)
    sources = [os.fspath(source) for source in sources]
    kept, loaded, skipped = inspect(sources, out, tokenizer, val_fraction, field, num_proc, force)
    fraction = val_fraction or min(0.1, VAL_BYTES / sum(piece.size for piece, _ in kept))
    meta = write(kept, loaded, sources, out, fraction, field, num_proc)
    report(meta, out, skipped, time.monotonic() - start, log)
    return meta


def report(meta, out, skipped, seconds, log):
    """Says what is in `out` and what to do next."""
    kind, val = meta["tokenizer"]["kind"], meta["val"]
    part = "documents" if val["by"] == "document" else "text, its end"
    log(f"Prepared {out} in {seconds:.1f} s: {kind} tokens, vocabulary {meta['vocab_size']:,}; "
        f"validation on {100 * val['fraction']:.3g}% of the {part}")
    log(f"       {'documents':>12} {'tokens':>16} {'bytes':>16}  bytes per token")
    for name, n in meta["splits"].items():
        log(f"{name:6} {n['documents']:12,} {n['tokens']:16,} {n['bytes']:16,} "
            f"{n['bytes'] / n['tokens']:16.2f}")
    if skipped:
        log(f"Passed over {skipped:,} files that are not UTF-8 text")
    if kind == "byte":
        log("Fewer, longer tokens: --tokenizer gpt2 (downloads 0.8 MB once)")
    log(f"Next: python run_train.py --data_dir {out}")


def ensure_dataset(data_dir, log=print):
    """Prepares the built-in dataset that a missing `data_dir` names (its last part is stdlib) and
    leaves anything else alone. Safe in several processes at once. Returns whether it did so."""
    if os.path.basename(os.path.normpath(data_dir)) != "stdlib":
        return False
    if os.path.isdir(data_dir) and any(n.endswith((".bin", ".npy")) for n in os.listdir(data_dir)):
        return False
    start = time.monotonic()
    meta = prepare([STDLIB], data_dir, log=lambda line: None)
    tokens = sum(part["tokens"] for part in meta["splits"].values())
    log(f"Prepared {data_dir} from the Python standard library of this machine: {tokens:,} byte "
        f"tokens in {time.monotonic() - start:.1f} s")
    return True


# --- the command line

def shakespeare_file(given):
    """Path of the tiny-shakespeare text: `given`, or data/bin/shakespeare.txt, downloaded once."""
    path = given or os.path.join("data", "bin", "shakespeare.txt")
    if os.path.isfile(path):
        found = sha256(Path(path).read_bytes())
        if found == SHAKESPEARE_SHA256:
            return path
        raise ValueError(f"{path}: not the tiny-shakespeare text: its sha256 is {found}, expected "
                         f"{SHAKESPEARE_SHA256}; text of your own is given as a SOURCE")
    if given:
        raise ValueError(f"{path}: no such file; --input names a copy of {SHAKESPEARE_URL}")
    try:
        write_atomically(path, download(SHAKESPEARE_URL, SHAKESPEARE_SHA256))
    except OSError as e:
        raise ValueError(f"dataset shakespeare: could not be downloaded ({e}). Without a network: "
                         f"on another machine\n    curl -o input.txt {SHAKESPEARE_URL}\n"
                         "    and then --dataset shakespeare --input input.txt") from None
    return path


def underscores(argument):
    """--num-proc=a-b to --num_proc=a-b; what is not a name stays."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--"):
        return argument
    return "--" + name[2:].replace("-", "_") + equals + value


def arguments(argv):
    """The parsed command line; dashes and underscores in names are the same."""
    parser = argparse.ArgumentParser(
        "python -m data.prepare", allow_abbrev=False,
        description="Turn text into token files: train.bin, val.bin and meta.json.")
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE",
        help="text files (.txt, .md, .py, ...: one document each), .jsonl files (one document a "
             "line), or folders of them; all UTF-8")
    add("--out", metavar="FOLDER",
        help="where to write (default: data/bin/ and the name of the first source)")
    add("--tokenizer", default="byte", metavar="NAME",
        help="byte (any text, 257 tokens), char (a token for each character of the text), gpt2 "
             "(50,257 tokens; 0.8 MB downloaded once), a rank file in tiktoken's format, or a "
             "prepared folder to share its tokenizer (default: byte)")
    add("--val_fraction", type=float, metavar="F",
        help="share of the text for validation: documents drawn by a hash, or where these are few "
             "the end of the text (default: 0.1, but at most 10 MB)")
    add("--field", default="text", metavar="NAME",
        help="field of .jsonl records that holds the text (default: text)")
    add("--dataset", choices=("stdlib", "shakespeare"),
        help="instead of sources: the standard library of this Python, or tiny-shakespeare "
             "(1.1 MB, downloaded once)")
    add("--input", metavar="FILE",
        help="with --dataset shakespeare: a copy of it, so that nothing is downloaded")
    add("--num_proc", type=int, metavar="N",
        help="processes (default: as many cores as the size is worth)")
    add("--force", action="store_true", help="replace what a folder holds from other sources")
    args = parser.parse_args([underscores(a) for a in argv])
    if bool(args.sources) == bool(args.dataset):
        parser.error("give one or more SOURCEs, or --dataset stdlib or shakespeare")
    if args.input and args.dataset != "shakespeare":
        parser.error("--input goes with --dataset shakespeare")
    return args


def main(argv=None):
    """Runs the command; its exit code: 2 for a problem, 130 for Ctrl-C."""
    args = arguments(sys.argv[1:] if argv is None else argv)
    try:
        sources = args.sources
        if args.dataset:
            sources = [STDLIB if args.dataset == "stdlib" else shakespeare_file(args.input)]
        name = args.dataset or Path(sources[0]).resolve().stem
        prepare(sources, args.out or os.path.join("data", "bin", name), args.tokenizer,
                args.val_fraction, args.field, args.num_proc, args.force)
    except (ValueError, OSError) as e:
        print(f"data.prepare: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("data.prepare: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the clean-up, as Ctrl-C
    sys.exit(main())
