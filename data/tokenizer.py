"""Open a tokenizer by name, or from a file, a folder or a checkpoint."""

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
    data_errors,
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
    """Return the tokenizer of a name, file, folder, Hugging Face model or checkpoint.

    source: byte, gpt2, a rank file in tiktoken's format, a folder of prepared data, a Hugging Face
    folder, hf:OWNER/NAME, or a checkpoint (.pt). Raises DataError if there is no tokenizer or it
    cannot be read, CheckpointError for a checkpoint that cannot be read, SetupError without a
    required package.
    """
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
                        "rank file in tiktoken's format, a checkpoint or a folder") from None


def load_tokenizer(name: str, path: str | os.PathLike | None = None) -> Tokenizer:
    """Return the tokenizer in the file or folder `path`; without it, open_tokenizer(name)."""
    return open_tokenizer(os.fspath(path or name))


def gpt2_ranks():
    """Return GPT-2's {token bytes: rank} from tiktoken's cache or by a download, else DataError."""
    try:
        return tiktoken.load.load_tiktoken_bpe(R50K_URL, R50K_SHA256)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer gpt2: its ranks could not be downloaded ({str(error)[:80]}); "
                        f"on another machine `curl -O {R50K_URL}`, then --tokenizer "
                        "r50k_base.tiktoken; or --tokenizer byte, which needs no file") from None


def is_same_tokenizer(spec_a, spec_b):
    """Return whether two tokenizers, as dicts of `Tokenizer.spec`, have the same ids.

    Compared are the number of ids, the end of text, and the bytes of ids that are special in
    neither. The dicts may differ, e.g. GPT-2's as a rank file and as a tokenizer.json.
    """
    if spec_a == spec_b:
        return True
    a, b = tokenizer_from_spec(spec_a), tokenizer_from_spec(spec_b)
    special = {*a.special.values(), *b.special.values()}
    return ((a.n_vocab, a.eot_token) == (b.n_vocab, b.eot_token) and all(
        i in special or a.bytes_of(i) == b.bytes_of(i) for i in range(a.n_vocab)))


# -----------------------------------------------------------------------------
# data folders and checkpoints

def load_dataset_tokenizer(data_dir):
    """Return the tokenizer of a data folder's meta.json or nanoGPT's meta.pkl, or `None`.

    data_dir: the folder, or a file or glob pattern of training data, see find_files. Raises
    DataError if the description is damaged, the preparation was interrupted, or matching files are
    in folders with different tokenizers; SetupError without a required package.
    """
    if os.path.isdir(data_dir):
        return load_folder_tokenizer(data_dir)
    folders = sorted({os.path.dirname(path) or "." for path in find_files(data_dir, "train")})
    tokenizers = [load_folder_tokenizer(folder) for folder in folders]
    specs = [tokenizer and tokenizer.spec() for tokenizer in tokenizers]
    if any(spec != specs[0] for spec in specs):
        raise DataError(f"{data_dir}: the tokenizers of {', '.join(folders)} differ; prepare all "
                        "with the same")
    return tokenizers[0]


def load_folder_tokenizer(folder):
    """Return the tokenizer of a data folder, or `None`, like load_dataset_tokenizer."""
    meta = read_meta(folder)
    with data_errors(f"{folder}: its meta file describes no tokenizer that can be rebuilt; "
                     "prepare it again"):
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


def write_tokenizer(folder, tokenizer):
    """Write any ranks or tokenizer.json of a tokenizer to `folder`; return arguments of Meta."""
    spec = tokenizer.spec()
    for part, name in TOKENIZER_FILES.items():
        if part in spec:
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
                f.write(spec.pop(part))
            spec[f"{part}_file"] = name
    return dict(vocab_size=tokenizer.n_vocab, tokenizer=spec, eot_token=tokenizer.eot_token)


def find_vocabulary(data_dir, name=None, size=None):
    """Return (vocabulary size, tokenizer or `None`) for token files; for data_dir see find_files.

    The tokenizer is that of the data's meta.json or meta.pkl; without this, open_tokenizer(name),
    or `None` if name is empty. The size is the first known one of: `size`, the tokenizer's,
    vocab_size in meta.json, GPT-2's 50257. Raises DataError if `name` is another tokenizer than
    that of the data, if `size` is below the tokenizer's, or with neither tokenizer nor token files.
    """
    tokenizer = load_dataset_tokenizer(data_dir)
    if name and name != (tokenizer and tokenizer.kind):  # gpt2 is in the data, and not downloaded
        named = open_tokenizer(name)
        if tokenizer and not is_same_tokenizer(tokenizer.spec(), named.spec()):
            raise DataError(f"tokenizer: {name} is not the tokenizer of {data_dir}; leave the key "
                            "out, or prepare the data with it")
        tokenizer = named
    if tokenizer is None:
        folder = os.path.dirname(find_files(data_dir, "train")[0])
        return size or read_meta(folder).vocab_size or GPT2_VOCAB_SIZE, None
    if size and tokenizer.n_vocab > size:
        raise DataError(f"vocab_size: {size} is below the {tokenizer.n_vocab} of the tokenizer of "
                        f"{data_dir}; leave it out, or prepare data with the weights' tokenizer")
    return size or tokenizer.n_vocab, tokenizer


def saved_formats(state):
    """Return {"tokenizer": spec or `None`, "template": spec or `None`} of a checkpoint's dict."""
    spec = state.get("spec") or {}
    return dict(tokenizer=spec.get("tokenizer") or state.get("tokenizer"),
                template=spec.get("template"))


def read_checkpoint_spec(path):
    """Return the saved_formats() of a checkpoint file, and "block_size", an int or `None`.

    Raises DataError if the checkpoint has no tokenizer, CheckpointError if it cannot be read.
    """
    from train.base.checkpoint_file import load_checkpoint  # imports torch
    state = load_checkpoint(path)
    spec = saved_formats(state)
    if not spec["tokenizer"]:
        raise DataError(f"{path}: no tokenizer; name it: byte, gpt2, a rank file, a data folder")
    return spec | dict(block_size=state.get("model_args", {}).get("block_size"))
