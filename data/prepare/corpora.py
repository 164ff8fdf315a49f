"""Known data sets by name: python -m data.prepare --dataset NAME."""

import contextlib
import hashlib
import os
import time
from typing import NamedTuple

from data.hub import HUB, download, fetch_file
from data.meta import Meta, write_meta
from data.prepare.folders import overwrite_problems
from data.records import raise_problems
from data.token_files import open_shard
from data.tokenizer import open_tokenizer, write_tokenizer
from train.base.errors import DataError
from train.base.files import atomic_write

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class Corpus(NamedTuple):
    """Files of a data set of the Hugging Face hub."""
    repo: str
    names: list         # of token files, the first is the validation split
    tokens: bool        # shards of GPT-2 tokens in llm.c's format; otherwise text or records
    separator: str | None = None


CORPORA = {
    "fineweb10B": Corpus("kjj0/fineweb10B-gpt2", [
        "fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 104))], True),
    "fineweb_edu": Corpus("kjj0/finewebedu10B-gpt2", [
        "finewebedu_val_000000.bin", *(f"finewebedu_train_{i:06d}.bin" for i in range(1, 100))],
        True),
    "openwebtext": Corpus("Skylion007/openwebtext", [
        f"plain_text/train-{i:05d}-of-00080.parquet" for i in range(80)], False),
    "tinystories": Corpus("roneneldan/TinyStories", ["TinyStoriesV2-GPT4-train.txt"], False,
                          "<|endoftext|>"),
}


def shakespeare(path):
    """Return the path of the tiny-shakespeare text: `path`, or data/bin/shakespeare.txt, which is
    downloaded if necessary. Raises DataError."""
    target = path or os.path.join("data", "bin", "shakespeare.txt")
    if path and not os.path.isfile(path):
        raise DataError(f"{path}: no such file; --input names a copy of {SHAKESPEARE_URL}")
    if os.path.isfile(target):
        with open(target, "rb") as f:
            digest = hashlib.sha256(f.read()).hexdigest()
        if digest != SHAKESPEARE_SHA256:
            raise DataError(f"{target}: not the tiny-shakespeare text: its sha256 is {digest}, "
                            f"expected {SHAKESPEARE_SHA256}; give text of your own as a SOURCE")
        return target
    try:
        content = fetch_file(SHAKESPEARE_URL, SHAKESPEARE_SHA256)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with atomic_write(target) as f:
            f.write(content)
    except OSError as error:
        raise DataError(f"dataset shakespeare: could not be downloaded ({str(error)[:200]}). "
                        f"Without a network: on another machine\n    curl -o input.txt "
                        f"{SHAKESPEARE_URL}\n    and then --dataset shakespeare --input input.txt"
                        ) from None
    return target


def download_corpus(name, mirror=None, shards=None, folder=None):
    """Return the paths of a corpus's files (the first `shards` training files), downloaded to
    `folder`, or to the cache of huggingface_hub. Raises DataError."""
    corpus = CORPORA[name]
    return [download(f"dataset {name}", "hf_hub_download", mirror, repo_id=corpus.repo,
                     filename=file, repo_type="dataset", local_dir=folder)
            for file in corpus.names[:shards and shards + corpus.tokens]]


def prepare_tokens(name, out, tokenizer_name, mirror, shards, force, log):
    """Download a corpus of GPT-2 tokens into the folder `out`, and write meta.json. Returns the
    number of training tokens."""
    start = time.monotonic()
    tokenizer = open_tokenizer(tokenizer_name or "gpt2")
    if tokenizer.kind != "gpt2":
        raise DataError(f"dataset {name}: its tokens are GPT-2's; --tokenizer can only name a copy "
                        "of gpt2's rank file")
    sources = [f"{HUB}/datasets/{CORPORA[name].repo}/resolve/main/"]
    raise_problems(overwrite_problems(out, "gpt", sources, force))
    os.makedirs(out, exist_ok=True)
    for file in ("train.bin", "val.bin"):  # of other sources, which would hide the shards
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(out, file))
    meta = Meta("gpt", "uint16", **write_tokenizer(out, tokenizer), sources=sources,
                incomplete=True)
    write_meta(out, meta)  # an interrupted download can be resumed
    paths = download_corpus(name, mirror, shards, out)
    meta.incomplete = None
    write_meta(out, meta)
    n_val, *n_train = (open_shard(path, "uint16").n_tokens for path in paths)
    log(f"Prepared {out} in {time.monotonic() - start:.1f} s: gpt2 tokens, {n_val:,} for "
        f"validation, {sum(n_train):,} in {len(n_train)} training files")
    return sum(n_train)
