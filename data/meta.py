"""meta.json: the description of a folder of prepared data.

One dataclass, one reader and one writer for all kinds of prepared data. nanoGPT's meta.pkl is read
as well, without running code from it.
"""

import json
import os
import pickle
import reprlib
from dataclasses import dataclass, field, fields
from pathlib import Path

from train.base.errors import DataError
from train.base.files import write_text

MAX_ID = 1 << 24  # larger than any vocabulary
# The key `kind` of folders that earlier versions prepared, and the model type of each.
KIND_TO_MODEL = {"pairs": "dpo", "prompts": "grpo", "features": "autoencoder"}


@dataclass
class Meta:
    """The contents of meta.json, which describes a folder of prepared data.

    A field that is `None` is not written. extra: all other keys, which only one model type uses; in
    the file they are at the top level.
    """
    model: str | None = None         # the --model that the data are for, if known
    dtype: str | None = None         # of raw token files: uint16 or uint32
    vocab_size: int | None = None
    tokenizer: dict | None = None    # Tokenizer.spec(), except parts in separate files
    eot_token: int | None = None     # id of the end of text
    block_size: int | None = None    # longest row, without the last target
    template: dict | None = None     # ChatTemplate.spec
    splits: dict | None = None       # {"train": {"tokens": 9, ...}, "val": ...}
    sources: list | None = None      # set by the commands of data.prepare only
    incomplete: bool | None = None   # True while the files of a folder are being replaced
    extra: dict = field(default_factory=dict)

    def to_dict(self):
        """Return the content of meta.json: format_version, fields other than `None`, `extra`."""
        common = {k: v for k, v in vars(self).items() if k != "extra" and v is not None}
        return {"format_version": 1} | common | self.extra


COMMON_KEYS = [f.name for f in fields(Meta) if f.name != "extra"]


def write_meta(folder, meta):
    """Write folder/meta.json atomically; other files must be complete unless meta.incomplete."""
    write_text(os.path.join(folder, "meta.json"), json.dumps(meta.to_dict(), indent=1) + "\n")


def read_meta(folder, allow_incomplete=False):
    """Return the Meta of meta.json, or of nanoGPT's meta.pkl, in `folder`; Meta() without either.

    Raises DataError for a damaged file and, unless allow_incomplete, an interrupted preparation.
    """
    for name, load in (("meta.json", json.load),
                       ("meta.pkl", lambda f: PlainUnpickler(f).load())):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        try:
            with open(path, "rb") as f:
                meta = parse_meta(load(f))
        except Exception as error:  # a damaged pickle can raise anything
            raise DataError(f"{path}: {error}; prepare the data again") from None
        if meta.incomplete and not allow_incomplete:
            raise DataError(f"{path}: its preparation was interrupted; prepare the data again")
        return meta
    return Meta()


def is_written(folder):
    """Return whether `folder` has a meta.json of write_meta(), not one of another program."""
    path = Path(folder, "meta.json")
    # os.path.isfile is False in a folder without permission: walk() names the folder.
    return os.path.isfile(path) and b'"format_version"' in path.read_bytes()[:30]


def parse_meta(content):
    """Return the Meta of the loaded value of a meta.json or meta.pkl.

    Keys that are not fields of Meta are put into `extra`. A missing model is derived from `kind`, a
    key of earlier versions; without this, it is "gpt" if there are `sources`. Raises ValueError if
    the value is not a dict, or has an invalid format_version, dtype, vocab_size or block_size.
    """
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, expected a dictionary")
    extra = dict(content)
    kind = extra.pop("kind", None)
    version = extra.pop("format_version", 1)
    if version != 1:
        raise ValueError(f"format_version {version!r:.20} of a later ironGPT")
    if content.get("dtype", "uint16") not in ("uint16", "uint32"):
        raise ValueError(f"dtype is {reprlib.repr(content['dtype'])}, expected uint16 or uint32")
    for name in ("vocab_size", "block_size"):
        size = content.get(name, 1)
        if type(size) is not int or not 1 <= size <= MAX_ID:
            raise ValueError(f"{name} is {reprlib.repr(size)}, expected 1 to {MAX_ID:,}")
    common = {name: extra.pop(name) for name in COMMON_KEYS if name in extra}
    meta = Meta(**common, extra=extra)
    if meta.model is None:
        meta.model = KIND_TO_MODEL.get(kind, kind) or ("gpt" if meta.sources else None)
    return meta


def read_meta_for(model, folder, how_to_prepare, *keys):
    """Return the Meta of a folder that was prepared for the model type `model`, a value of --model.

    keys: names that must be present. how_to_prepare: the end of the error message.
    Raises DataError if a key is missing or the folder is for a different model type (an unknown one
    is accepted), and as read_meta().
    """
    meta = read_meta(folder)
    if meta.model not in (None, model):
        raise DataError(f"{folder}: no data for --model {model}{model_hint(folder)}; "
                        f"{how_to_prepare}")
    if missing := [name for name in keys if name not in meta.to_dict()]:
        exists = os.path.isdir(folder)
        problem = f"no {missing[0]} in a meta.json there" if exists else "no such folder"
        raise DataError(f"{folder}: {problem}{model_hint(folder)}; {how_to_prepare}")
    return meta


def is_prepared(folder):
    """Return whether a folder has a train.bin and no meta.json of an interrupted preparation."""
    return (os.path.exists(os.path.join(folder, "train.bin"))
            and not read_meta(folder, allow_incomplete=True).incomplete)


def prepared_model(folder):
    """Return the model type for which a folder was prepared, e.g. "gpt", or `None` if unknown.

    It is always "gpt" with a train.bin; meta.json is then not read. Otherwise raises DataError if
    meta.json is damaged or states that the preparation was interrupted.
    """
    if os.path.exists(os.path.join(folder, "train.bin")):
        return "gpt"
    return read_meta(folder).model


def model_hint(folder):
    """Return "; it is for --model NAME" for an error message; "" if the model is unknown."""
    model = prepared_model(folder)
    return f"; it is for --model {model}" if model else ""


# -----------------------------------------------------------------------------
# pickles

class PlainUnpickler(pickle.Unpickler):
    """Unpickler of builtin types; load() raises ValueError for pickled classes and functions."""

    def find_class(self, module, name):
        raise ValueError(f"it names {module}.{name}, which could run code")
