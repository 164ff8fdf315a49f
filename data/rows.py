"""Arrays of rows: files SPLIT_NAME.npy (e.g. train_tokens.npy) with one row per sample, and the
rules that divide samples into splits.

Commands of data.prepare write the arrays (save_arrays), model types read them (open_rows).
"""

import hashlib
import os

import numpy as np

from data.token_files import CHECKED_WHOLE, mix64, open_npy
from train.base.errors import DataError

MAX_OPEN_ROWS = 100  # rows that pack_chats considers
GROUPS = 2**56       # limit of hash_group


def id_dtype(n_vocab):
    """Return the dtype of token ids in files for a vocabulary of n_vocab ids: little-endian uint16,
    or uint32 if n_vocab is more than 65,536."""
    return np.dtype("<u2" if n_vocab <= 65536 else "<u4")


# -----------------------------------------------------------------------------
# reading

def open_rows(folder, split, **limits):
    """Open the files folder/SPLIT_NAME.npy of a split. Return the list of the memory-mapped arrays,
    read-only, one for each keyword argument in `limits`, in the same order. limits: NAME=(shape,
    low, limit). shape: of a row, i.e. without the first dimension; `None` in it allows any size.
    Values must be integers with low <= value < limit, or finite float32 or NaN (a missing value) if
    `limit` is `None`; of a large array, only a part of the rows is checked. All arrays must have
    the same number of rows. Raises DataError if a file is missing or does not fit."""
    arrays = []
    for name, (shape, low, limit) in limits.items():
        path = os.path.join(folder, f"{split}_{name}.npy")
        n_rows = len(arrays[0]) if arrays else None
        array = open_npy(path)
        check_array(path, array, (n_rows, *shape), limit, low)
        arrays.append(array)
    return arrays


def check_array(path, array, shape, limit, low=0):
    """Raise DataError unless `array` has the shape `shape`, which includes the first dimension
    (`None` in it: any size), and integers with low <= value < limit, or, if `limit` is `None`,
    finite float32 numbers or NaN. Of a large array, only a part of the rows is checked. path: of
    the file, for the message."""
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
    """Return a NumPy array (n, width) of `dtype` with the numbers of `rows`, n sequences of at most
    `width` numbers each (otherwise raises ValueError), filled up at the end with `value`: a number,
    or a list that broadcasts to (n, width)."""
    padded = np.full((len(rows), width), value, dtype)
    for target, row in zip(padded, rows):
        target[:len(row)] = row
    return padded


def save_arrays(folder, split, **arrays):
    """Write each array of the keyword arguments NAME=array to the file folder/SPLIT_NAME.npy, where
    SPLIT is the argument `split`."""
    for name, array in arrays.items():
        np.save(os.path.join(folder, f"{split}_{name}.npy"), array)


def pack_chats(chats, width):
    """Pack conversations into rows of at most `width` tokens, without dividing a conversation.
    Return the list of rows, each a list of conversations. chats: a list of (ids, mask) of at most
    `width` tokens each. A conversation is added to the fullest of the last MAX_OPEN_ROWS rows that
    has enough room (best fit); if no row has, to a new row."""
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

def documents_in_val(first, count, fraction):
    """Return a bool array (count,): whether each of the documents with the indices first, first +
    1, ... is for validation. About `fraction` of all documents are, chosen by a hash (splitmix64)
    of the index."""
    index = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    return (mix64(index * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) * 2.0 ** -53 < fraction


def hash_group(group):
    """Return a hash of the text `group`, an int from 0 to GROUPS - 1 (GROUPS = 2**56), which is the
    same on every machine."""
    digest = hashlib.blake2b(group.encode("utf-8", "replace"), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def split_by_group(group, fraction):
    """Return the split, "train", "val" or "test", of a sample of the group `group`, a text, by a
    hash of this text: samples of the same group are in the same split. About `fraction` of the
    groups are in val, and as many in test."""
    position = hash_group(group) / GROUPS
    if position < fraction:
        return "test"
    return "val" if position < 2 * fraction else "train"


def split_by_prompt(samples, fraction):
    """Split samples by a hash of the prompt, so that samples with the same prompt are in the same
    split. Return {"train": list of samples, "val": list of samples}, about `fraction` of the
    samples in val. samples: a list; sample[0] is (ids, mask), arrays (n,). The prompt is the ids
    before the first answer, i.e. before consecutive 1s in the mask; if all samples have the same
    prompt, the ids before the second or third answer are used instead, or all ids if there are
    fewer answers. The sample with the lowest hash is always in val."""
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
    """Return a bool array (n,), True for the rows of the validation split: whole runs, evenly
    spread over the sorted runs, about `fraction` of the runs and at least one, but not all. A run
    is a set of rows that must not be divided, e.g. one recording. runs: (n,), the number of each
    row's run. whose: text for the message, e.g. " of subject 3". Raises DataError if there is only
    one run."""
    labels, index = np.unique(runs, return_inverse=True)
    n = len(labels)
    if n < 2:
        raise DataError(f"all rows{whose} are one run: nothing can be held out; give other --runs")
    count = min(n - 1, max(1, round(fraction * n)))
    chosen = (np.arange(count) * 2 + 1) * n // (2 * count)  # the middles of `count` equal parts
    return np.isin(index, chosen)
