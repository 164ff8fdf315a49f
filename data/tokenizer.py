"""Opening tokenizers: by name, file, folder, checkpoint or spec."""

import os

import tiktoken.load

from data.hub import local_folder
from data.meta import read_meta
from data.token_files import find_files
from data.tokenizer_hf import read_hf_tokenizer
from data.tokenizer_types import (
    R50K_SHA256,
    CharTokenizer,
    Tokenizer,
    parse_ranks,
    rank_tokenizer,
    tokenizer_from_spec,
)
from train.base.errors import DataError

# Large parts of a spec, which are separate files in a data folder.
TOKENIZER_FILES = {"ranks": "tokenizer.tiktoken", "json": "tokenizer.json"}
NAMES = ("byte", "char", "gpt2", "bpe")
GPT2_VOCAB_SIZE = 50257  # of token files without meta.json, as of nanoGPT and llm.c
# GPT-2's vocabulary in one file; tiktoken's "gpt2" needs two files for the same ids.
R50K_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


def open_tokenizer(source) -> Tokenizer:
    """Return the tokenizer that `source` names: byte, gpt2, a rank file in tiktoken's format, a
    folder of prepared data, a Hugging Face folder, hf:OWNER/NAME, a checkpoint (.pt), or the dict
    of `Tokenizer.spec`. Raises DataError if there is none or it cannot be read, CheckpointError for
    a checkpoint that cannot be read."""
    if isinstance(source, dict):
        return tokenizer_from_spec(source)
    if source == "byte":
        return tokenizer_from_spec({"kind": "byte"})
    if source == "gpt2":
        return rank_tokenizer(gpt2_ranks())
    if source in NAMES:
        raise DataError(f"tokenizer {source}: made of a text; give the folder prepared with it")
    if source.endswith(".pt"):
        return tokenizer_from_spec(read_checkpoint_spec(source)["tokenizer"])
    path = local_folder(source, weights=False)
    if os.path.isdir(path):
        has_json = os.path.exists(os.path.join(path, "tokenizer.json"))
        if has_json and not os.path.exists(os.path.join(path, "meta.json")):
            return read_hf_tokenizer(path)
        if tokenizer := load_dataset_tokenizer(path):
            return tokenizer
        raise DataError(f"{path}: this folder has no known tokenizer")
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return rank_tokenizer(parse_ranks(f.read(), path))
    except OSError as error:
        raise DataError(f"tokenizer {path!r}: {error.strerror}; expected byte, char, gpt2, bpe, a "
                        "rank file in tiktoken's format or a folder") from None


def load_tokenizer(name: str, path: str | os.PathLike | None = None) -> Tokenizer:
    """Return the tokenizer in the file or folder `path`, or without it the tokenizer `name` (byte,
    gpt2, a file or a folder). Raises DataError if it cannot be read, or if `name` is byte, char,
    gpt2 or bpe and the one at `path` is of another kind."""
    tokenizer = open_tokenizer(os.fspath(path or name))
    kind = "ranks" if name == "bpe" else name
    if path and name in NAMES and kind != tokenizer.kind:
        raise DataError(f"{path}: has no {name} tokenizer")
    return tokenizer


def gpt2_ranks():
    """Return GPT-2's {bytes of a token: rank}, from tiktoken's cache, or downloaded into it. Raises
    DataError if the download fails."""
    try:
        return tiktoken.load.load_tiktoken_bpe(R50K_URL, R50K_SHA256)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer gpt2: its ranks could not be downloaded ({str(error)[:80]}); "
                        f"on another machine `curl -O {R50K_URL}`, then --tokenizer "
                        "r50k_base.tiktoken; or --tokenizer byte, which needs no file") from None


def is_same_tokenizer(spec_a, spec_b):
    """Return whether two dicts of `Tokenizer.spec` give every id the same bytes, also if the dicts
    differ: GPT-2's tokenizer, for example, may be a rank file or a tokenizer.json. An id that is
    special in either is not compared, except that the end of text must be the same."""
    if spec_a == spec_b:
        return True
    a, b = tokenizer_from_spec(spec_a), tokenizer_from_spec(spec_b)
    special = {*a.special.values(), *b.special.values()}
    return ((a.n_vocab, a.eot_token) == (b.n_vocab, b.eot_token) and all(
        i in special or a.bytes_of(i) == b.bytes_of(i) for i in range(a.n_vocab)))


# -----------------------------------------------------------------------------
# data folders and checkpoints

def load_dataset_tokenizer(data_dir):
    """Return the tokenizer that meta.json, or nanoGPT's meta.pkl, in a data folder describes, or
    `None` if there is no description. data_dir: the folder or files in it. Raises DataError if the
    description is damaged."""
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
    """Write the large parts of a tokenizer's spec (ranks, tokenizer.json) to files in `folder`.
    Return keyword arguments for Meta, a dict: vocab_size, tokenizer (a spec that refers to these
    files) and eot_token."""
    spec = tokenizer.spec()
    for part, name in TOKENIZER_FILES.items():
        if part in spec:
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
                f.write(spec.pop(part))
            spec[f"{part}_file"] = name
    return dict(vocab_size=tokenizer.n_vocab, tokenizer=spec, eot_token=tokenizer.eot_token)


def find_vocabulary(data_dir, name=None, size=None):
    """Return (vocabulary size, tokenizer or `None`) of the token files of data_dir.

    The tokenizer is that of the files or, if they have none, open_tokenizer(name). The vocabulary
    size is the first that is known: `size`, the tokenizer's, that of meta.json, GPT-2's. Raises
    DataError if `size` is below the tokenizer's, and without a tokenizer if there are no files.
    """
    tokenizer = load_dataset_tokenizer(data_dir)
    if tokenizer is None and name:
        tokenizer = open_tokenizer(name)
    if tokenizer is None:
        folder = os.path.dirname(find_files(data_dir, "train")[0])
        return size or read_meta(folder).vocab_size or GPT2_VOCAB_SIZE, None
    if size and tokenizer.n_vocab > size:
        raise DataError(f"vocab_size: {size} is below the {tokenizer.n_vocab} of the tokenizer of "
                        f"{data_dir}; leave it out, or prepare data with the weights' tokenizer")
    return size or tokenizer.n_vocab, tokenizer


def read_checkpoint_spec(path):
    """Return {"tokenizer": dict of Tokenizer.spec, "template": dict of ChatTemplate.spec or `None`,
    "block_size": int or `None`} of the checkpoint file `path`. Raises DataError if it names no
    tokenizer, CheckpointError if it cannot be read."""
    from train.base.checkpoint_file import load_checkpoint  # imports torch
    state = load_checkpoint(path)
    data_spec = state.get("spec") or {}
    tokenizer = data_spec.get("tokenizer") or state.get("tokenizer")
    if not tokenizer:
        raise DataError(f"{path}: no tokenizer; name it: byte, gpt2, a rank file, a data folder")
    return dict(tokenizer=tokenizer, template=data_spec.get("template"),
                block_size=state.get("model_args", {}).get("block_size"))
