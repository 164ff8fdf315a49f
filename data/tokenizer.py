"""Opening tokenizers: by name, file, folder, checkpoint or spec."""

import contextlib
import difflib
import hashlib
import os
import tempfile

from data.hub import fetch_file, local_folder
from data.meta import read_meta
from data.token_files import find_files
from data.tokenizer_hf import GPT2_PATTERN, R50K_SHA256, read_hf_tokenizer
from data.tokenizer_types import (  # noqa: F401 (some are names that scripts import from here)
    MAX_VOCAB,
    CharTokenizer,
    JsonTokenizer,
    RankTokenizer,
    Tokenizer,
    parse_ranks,
    tokenizer_from_spec,
)
from train.base.errors import DataError
from train.base.files import atomic_write

# Large parts of a spec, which are separate files in a data folder.
TOKENIZER_FILES = {"ranks": "tokenizer.tiktoken", "json": "tokenizer.json"}
NAMES = ("byte", "char", "gpt2", "bpe")
GPT2_VOCAB_SIZE = 50257  # of token files without meta.json, as of nanoGPT and llm.c
# GPT-2's vocabulary in one file; tiktoken's "gpt2" needs two files for the same ids.
R50K_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


def open_tokenizer(source) -> Tokenizer:
    """Return the tokenizer that `source` names: byte, gpt2, a rank file, a data folder, a Hugging
    Face folder, hf:OWNER/NAME, a checkpoint (.pt), or the dict of `Tokenizer.spec`. Raises
    DataError."""
    if isinstance(source, dict):
        return tokenizer_from_spec(source)
    if source.endswith(".pt"):
        return tokenizer_from_spec(read_checkpoint_spec(source)["tokenizer"])
    folder = local_folder(source, weights=False)
    has_json = os.path.exists(os.path.join(folder, "tokenizer.json"))
    if has_json and not os.path.exists(os.path.join(folder, "meta.json")):
        return read_hf_tokenizer(folder)
    return load_tokenizer(folder)


def load_tokenizer(name: str, path: str | os.PathLike | None = None) -> Tokenizer:
    """Return the tokenizer byte or gpt2, or that of a rank file or data folder, which is given as
    `path` or as `name`. char and bpe are made from a text and need a folder."""
    path = os.path.expanduser(path or ("" if name in NAMES else name))
    if path and os.path.isdir(path):
        tokenizer = load_dataset_tokenizer(path)
        if tokenizer is None or name in NAMES and name != tokenizer.kind:
            kind = name if name in NAMES else "known"
            raise DataError(f"{path}: this folder has no {kind} tokenizer")
        return tokenizer
    if name == "byte":
        return tokenizer_from_spec({"kind": "byte"})
    if name == "gpt2" and not path:
        return tokenizer_from_ranks(gpt2_ranks(), "gpt2")
    if name in ("char", "bpe"):
        raise DataError(f"tokenizer {name}: it is made of a text; give the folder prepared with it")
    if not os.path.isfile(path):
        near = difflib.get_close_matches(name, NAMES, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"tokenizer {path!r}: no such name or file; expected byte, char, gpt2, "
                        f"bpe, a rank file in tiktoken's format or a prepared folder{hint}")
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return tokenizer_from_ranks(f.read(), path)
    except OSError as error:
        raise DataError(f"tokenizer {path}: cannot be read: {error.strerror}") from None


# -----------------------------------------------------------------------------
# data folders and checkpoints

def load_dataset_tokenizer(data_dir):
    """Return the tokenizer of a data folder, or of token files in one, from meta.json or nanoGPT's
    meta.pkl, or `None`."""
    folder = data_dir if os.path.isdir(data_dir) else os.path.dirname(data_dir)
    meta = read_meta(folder)
    try:
        if itos := meta.extra.get("itos"):  # nanoGPT's characters
            chars = [itos[i] for i in range(len(itos))]
            if any(len(c) != 1 for c in chars):
                raise ValueError("its itos has other things than characters")
            return CharTokenizer("".join(chars))
        if not meta.tokenizer:
            return None
        spec = dict(meta.tokenizer)
        for part in TOKENIZER_FILES:
            if name := spec.get(f"{part}_file"):
                # The base name only: never a file outside the folder.
                with open(os.path.join(folder, os.path.basename(name)), "rb") as f:
                    spec[part] = f.read().decode()
        return tokenizer_from_spec(spec)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise DataError(f"{folder or '.'}: its meta file describes no tokenizer that can be "
                        f"rebuilt: {error}; prepare it again") from None


def write_tokenizer(folder, tokenizer):
    """Write the large parts of a tokenizer's spec to files in `folder`. Returns the keys of Meta:
    vocab_size, tokenizer (a spec that refers to these files) and eot_token."""
    spec = tokenizer.spec()
    for part, name in TOKENIZER_FILES.items():
        if part in spec:
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
                f.write(spec.pop(part))
            spec[f"{part}_file"] = name
    return dict(vocab_size=tokenizer.n_vocab, tokenizer=spec, eot_token=tokenizer.eot_token)


def find_vocabulary(data_dir, name=None, size=None):
    """Return (vocabulary size, tokenizer or `None`) of token files.

    The tokenizer is that of the files or, by default, the one called `name`. The vocabulary size is
    the first that is known: `size`, the tokenizer's, that of meta.json. Raises DataError if `size`
    is too small.
    """
    tokenizer = load_dataset_tokenizer(data_dir)
    if tokenizer is None and name:
        tokenizer = open_tokenizer(name)
    if tokenizer is None:
        folder = os.path.dirname(find_files(data_dir, "train")[0])
        return size or read_meta(folder).vocab_size or GPT2_VOCAB_SIZE, None
    if size and tokenizer.n_vocab > size:
        raise DataError(f"vocab_size: {size} is below the {tokenizer.n_vocab} of the tokenizer of "
                        f"{data_dir}; leave vocab_size out to take the data's or, where weights "
                        "to start from say it, prepare the data with their tokenizer")
    return size or tokenizer.n_vocab, tokenizer


def read_checkpoint_spec(path):
    """Return {"tokenizer": spec, "template": spec or `None`, "block_size": int or `None`} of a
    checkpoint. Raises DataError if it names no tokenizer."""
    from train.base.checkpoint_file import load_checkpoint  # imports torch
    state = load_checkpoint(path)
    data_spec = state.get("spec") or {}
    tokenizer = data_spec.get("tokenizer") or state.get("tokenizer")
    if not tokenizer:
        raise DataError(f"{path}: this checkpoint names no tokenizer; name it: byte, gpt2, a rank "
                        "file or a prepared folder")
    return dict(tokenizer=tokenizer, template=data_spec.get("template"),
                block_size=state.get("model_args", {}).get("block_size"))


# -----------------------------------------------------------------------------
# rank files

def tokenizer_from_ranks(text, where):
    """Return the tokenizer of a rank file. Text is split as by GPT-2; the end of text follows the
    last rank."""
    is_gpt2 = hashlib.sha256(text.encode()).hexdigest() == R50K_SHA256
    ranks = parse_ranks(text, where)
    return RankTokenizer("gpt2" if is_gpt2 else "ranks", ranks, GPT2_PATTERN,
                         max(ranks.values()) + 1)


def gpt2_ranks():
    """Return the text of GPT-2's rank file, from tiktoken's cache, or downloaded into it."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get(
        "DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache")))
    # tiktoken's rule: the name is the sha1 of the address; an empty folder name disables the cache.
    path = os.path.join(folder, hashlib.sha1(R50K_URL.encode()).hexdigest()) if folder else ""
    if os.path.isfile(path):
        with open(path, "rb") as f:
            content = f.read()
        if hashlib.sha256(content).hexdigest() == R50K_SHA256:
            return content.decode("ascii")
    try:
        content = fetch_file(R50K_URL, R50K_SHA256)
    except OSError as error:
        raise DataError(
            f"tokenizer gpt2: its rank file (0.8 MB) is not cached ({path or 'no cache folder'}) "
            f"and could not be downloaded ({str(error)[:80] or type(error).__name__}). Without a "
            f"network: on another machine\n    curl -O {R50K_URL}\n    and then --tokenizer "
            f"r50k_base.tiktoken, or copy it to {path or '$TIKTOKEN_CACHE_DIR'}; or use "
            "--tokenizer byte, which needs no file") from None
    if path:
        with contextlib.suppress(OSError):  # without a writable cache it is downloaded each time
            os.makedirs(folder, exist_ok=True)
            with atomic_write(path) as f:
                f.write(content)
    return content.decode("ascii")
