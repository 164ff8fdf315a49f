"""Arrays of rows in files SPLIT_NAME.npy, and the rules that divide samples into splits.

A file, e.g. train_tokens.npy, has one row per sample. Commands of data.prepare write the arrays
(save_arrays), model types read them (open_rows).
"""

import hashlib
import os

import numpy as np

from data.token_files import CHECKED_WHOLE, mix64, open_npy
from train.base.errors import DataError

MAX_OPEN_ROWS = 100  # rows that pack_chats considers
GROUPS = 2**56       # limit of hash_group


def id_dtype(n_vocab):
    """Return the dtype of token ids in files: little-endian uint16, or uint32 above 65,536 ids."""
    return np.dtype("<u2" if n_vocab <= 65536 else "<u4")


# -----------------------------------------------------------------------------
# reading

def open_rows(folder, split, **limits):
    """Return the arrays of the files folder/SPLIT_NAME.npy, memory-mapped and read-only.

    limits: NAME=(shape of a row, low, limit); `None` in the shape allows any size. Values must be
    integers with low <= value < limit, or, if limit is `None`, float32, finite or NaN (a missing
    value); of a large array, only a part of the rows is checked. All arrays must have the same
    number of rows. Raises DataError if a file is missing or does not fit.
    """
    arrays = []
    for name, (shape, low, limit) in limits.items():
        path = os.path.join(folder, f"{split}_{name}.npy")
        n_rows = len(arrays[0]) if arrays else None
        array = open_npy(path)
        check_array(path, array, (n_rows, *shape), limit, low)
        arrays.append(array)
    return arrays


def check_array(path, array, shape, limit, low=0):
    """Raise DataError unless `array` has `shape` (of all dimensions) and values, see open_rows."""
    fits = len(array.shape) == len(shape) and all(
        size in (None, n) for n, size in zip(array.shape, shape))
    if not fits or not has_values(array, limit, low):
        kind = "float32 (NaN: missing)" if limit is None else f"integers from {low} to {limit - 1}"
        expected = " x ".join("n" if n is None else str(n) for n in shape)
        raise DataError(f"{path}: {array.dtype} of shape {array.shape}; expected {expected} "
                        f"{kind}; prepare the data again")


def has_values(array, limit, low):
    """Return whether an array (n, ...) has the values that check_array expects."""
    some = array[::1 + array.nbytes // CHECKED_WHOLE]
    if limit is None:
        return array.dtype == np.float32 and not np.isinf(some).any()
    return array.dtype.kind in "iu" and (
        not some.size or low <= int(some.min()) and int(some.max()) < limit)


# -----------------------------------------------------------------------------
# writing

def pad_rows(rows, width, value, dtype):
    """Return an array (n, width) of n sequences of numbers, each filled up at the end with `value`.

    value: a number, or a list that broadcasts to (n, width). Longer sequences raise ValueError.
    """
    padded = np.full((len(rows), width), value, dtype)
    for target, row in zip(padded, rows):
        target[:len(row)] = row
    return padded


def save_arrays(folder, split, **arrays):
    """Write each keyword argument NAME=array to the file folder/SPLIT_NAME.npy."""
    for name, array in arrays.items():
        np.save(os.path.join(folder, f"{split}_{name}.npy"), array)


def pack_chats(chats, width):
    """Pack conversations into rows of at most `width` tokens, without dividing any.

    chats: (ids, mask) of at most `width` tokens each; a row is a list of these. Each goes to the
    fullest of the last MAX_OPEN_ROWS (100) rows that has enough room (best fit), or to a new row.
    """
    def used(row):
        return sum(len(ids) for ids, _ in row)

    rows = []
    for chat in chats:
        fitting = [row for row in rows[-MAX_OPEN_ROWS:] if used(row) + len(chat[0]) <= width]
        if not fitting:
            rows.append([])
        max(fitting or rows[-1:], key=used).append(chat)
    return rows


# -----------------------------------------------------------------------------
# train and validation splits. The split of a sample does not change when data are added.

def documents_in_val(count, fraction):
    """Return a bool array (count,): whether documents 0, 1, ... are for validation.

    About `fraction` of all documents are, chosen by a hash (splitmix64) of the index.
    """
    index = np.arange(1, count + 1, dtype=np.uint64)
    return (mix64(index * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) * 2.0 ** -53 < fraction


def hash_group(group):
    """Return a hash of the text `group`, 0 <= hash < GROUPS, the same on every machine."""
    digest = hashlib.blake2b(group.encode("utf-8", "replace"), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def split_by_group(group, fraction):
    """Return the split of the group named `group` by a hash: "val", "test" or "train".

    About `fraction` of all groups are in each of "val" and "test". The result is always the same.
    """
    position = hash_group(group) / GROUPS
    if position < fraction:
        return "test"
    return "val" if position < 2 * fraction else "train"


def split_by_prompt(samples, fraction):
    """Split samples by a hash of the prompt into {"train": list, "val": list}, `fraction` in val.

    samples: sample[0] is (ids, mask), arrays (n,). Samples with the same prompt are in the same
    split; those of the prompt with the lowest hash always in val. The prompt is the ids before the
    first answer, i.e. before consecutive 1s in the mask; if all samples have the same prompt, the
    ids before the second or third answer, or all ids if there are fewer answers.
    """
    for n in range(3):  # e.g. every conversation begins with the same greeting
        prompts = [ids[(np.diff(mask.astype(np.int8), prepend=0) > 0).cumsum() <= n].tobytes()
                   for (ids, mask), *_ in samples]
        if len(set(prompts)) != 1:
            break
    hashes = [int.from_bytes(hashlib.blake2b(prompt, digest_size=8).digest(), "big")
              for prompt in prompts]
    limit = max(fraction * 2**64, min(hashes, default=0) + 1)
    splits = dict(train=[], val=[])
    for value, sample in zip(hashes, samples):
        splits["val" if value < limit else "train"].append(sample)
    return splits


def runs_in_val(runs, fraction, whose=""):
    """Return a bool array (n,), True for validation rows; runs are not divided.

    runs (n,): each row's run, e.g. a recording. About `fraction` of the runs is chosen, at least
    one but not all, evenly spread in sorted order. whose: text for the message, e.g. " of subject
    3". Raises DataError if there is only one run.
    """
    labels, index = np.unique(runs, return_inverse=True)
    n = len(labels)
    if n < 2:
        raise DataError(f"all rows{whose} are one run: nothing can be held out; give other --runs")
    count = min(n - 1, max(1, round(fraction * n)))
    chosen = (np.arange(count) * 2 + 1) * n // (2 * count)  # the middles of `count` equal parts
    return np.isin(index, chosen)
