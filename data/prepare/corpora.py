"""Known data sets by name: python -m data.prepare --dataset NAME."""

import os
import re

from tiktoken.load import read_file_cached

from data.hub import HUB, download
from data.meta import Meta, write_meta
from data.prepare.folders import PREPARED, check_replaceable
from data.token_files import open_shard
from data.tokenizer import open_tokenizer, write_tokenizer
from train.base.errors import DataError
from train.base.files import atomic_write, exclusive_lock

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


# Corpora of GPT-2's tokens in llm.c's format: repository of the Hugging Face hub, start of the
# files' names, number of training files.
CORPORA = {"fineweb10B": ("kjj0/fineweb10B-gpt2", "fineweb", 103),
           "fineweb_edu": ("kjj0/finewebedu10B-gpt2", "finewebedu", 99)}


def download_shakespeare():
    """Return the path of the tiny-shakespeare text; download it if missing, or raise DataError."""
    path = os.path.join("data", "bin", "shakespeare.txt")
    if not os.path.exists(path):
        try:
            content = read_file_cached(SHAKESPEARE_URL, SHAKESPEARE_SHA256)
        except (OSError, ValueError) as error:
            raise DataError(f"dataset shakespeare: could not be downloaded ({str(error)[:200]}); "
                            f"without a network, copy {SHAKESPEARE_URL} to {path}") from None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_write(path) as f:
            f.write(content)
    return path


def prepare_tokens(o):
    """Download the token files of o.dataset, already split, to the folder o.out; write meta.json.

    o: PrepareOptions; o.shards: number of training files (default: all).
    Returns {"train": {"tokens", "files"}, "val": {"tokens"}}. Removes files of an earlier
    preparation, and waits for another download to this folder. Raises DataError for a failed
    download, options for text, e.g. o.tokenizer, and a folder with data of other sources unless
    o.force is True; SetupError without the package huggingface_hub.
    """
    names = ("field", "num_samples", "val_fraction", "tokenizer", "vocab_size")
    if unused := [name for name in names if getattr(o, name)]:
        raise DataError(f"dataset {o.dataset} has GPT-2's tokens, already split: leave out "
                        f"--{unused[0]}")
    repo, start, n_files = CORPORA[o.dataset]
    sources = [f"{HUB}/datasets/{repo}/resolve/main/"]
    os.makedirs(o.out, exist_ok=True)
    files = [f"{start}_val_000000.bin",
             *(f"{start}_train_{i:06d}.bin" for i in range(1, (o.shards or n_files) + 1))]
    with exclusive_lock(o.out):  # another download would remove its files
        check_replaceable(o.out, "gpt", sources, o.force)
        meta = Meta("gpt", "uint16", **write_tokenizer(o.out, open_tokenizer("gpt2")),
                    sources=sources, incomplete=True)
        write_meta(o.out, meta)  # an interrupted download can be resumed
        for name in set(os.listdir(o.out)).difference(files, ["tokenizer.tiktoken"]):
            # Of an earlier preparation: training would read them instead of the shards, or too.
            if re.fullmatch(rf"{PREPARED}|fineweb(edu)?_(train|val)_\d+\.bin", name):
                os.unlink(os.path.join(o.out, name))
        paths = [download(f"dataset {o.dataset}", "hf_hub_download", repo_id=repo, filename=file,
                          repo_type="dataset", local_dir=os.path.abspath(o.out)) for file in files]
        n_val, *n_train = (open_shard(path, "uint16").n_tokens for path in paths)
        meta.incomplete = None
        write_meta(o.out, meta)
    return dict(train=dict(tokens=sum(n_train), files=len(n_train)), val=dict(tokens=n_val))
