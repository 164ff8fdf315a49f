"""Several data sets as one: `data_dir: data/bin/web:0.7,data/bin/code:0.3`.

A table, repeated periodically, assigns each sample g of the run to a source, one of the data sets.
Sample g is the next sample of that source, in the order and epochs of a run on only this source. So
the order is a function of (seed, step), the same at any world size. With shares 0.7 and 0.3:

    g             0    1    2    3    4    5    6    7    8    9    10
    source        web  code web  web  code web  web  web  code web  web
    its sample    0    0    1    2    1    3    4    5    2    6    7
"""

import functools
import math
import os
import re
from fractions import Fraction

import numpy as np

from train.base.errors import DataError
from train.base.fields import fields_by_name
from train.dataloader import Data, Loader

MAX_PERIOD = 10_000  # samples; shares are rounded to multiples of 1 / MAX_PERIOD
PER_ANSWER = ("exact", "answers")  # sums of conversations that are divided by "answers"


def samples_per_period(weights):
    """Return each source's number of samples in a period of the mixture, for positive `weights`.

    Exact if all shares (weight / sum of weights) are multiples of 1 / n with n up to MAX_PERIOD
    (10,000); otherwise rounded, perhaps to 0.
    """
    exact = [Fraction(str(w)) for w in weights]  # 0.7 is 7 / 10
    shares = [w / sum(exact) for w in exact]
    period = min(math.lcm(*(s.denominator for s in shares)), MAX_PERIOD)
    counts = [math.floor(s * period) for s in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * period)
    for i in by_remainder[:period - sum(counts)]:
        counts[i] += 1
    return counts


def interleave(counts):
    """Return the sources of a period's samples: sum(counts) indices, source i counts[i] times.

    counts: k >= 2 ints of at least 0. For any n, source i occurs n * counts[i] / sum(counts) times
    among the first n items, with a difference of at most 1 - 1 / (2 k - 2): Tijdeman, The chairman
    assignment problem (1980).
    """
    period = sum(counts)
    d = 2 * len(counts) - 2
    assigned = [0] * len(counts)
    table = []
    for n in range(1, period + 1):
        # The deficit of each source if it does not receive this place, in units of 1 / period.
        behind = [n * c - period * a for c, a in zip(counts, assigned)]
        due = [i for i, deficit in enumerate(behind) if d * deficit >= period]
        # The due source that would exceed the permitted difference first.
        source = min(due, key=lambda i: ((d - 1) * period - d * behind[i]) / counts[i])
        assigned[source] += 1
        table.append(source)
    return table


class Mixture(Loader):
    """A Loader that mixes the samples of `loaders`, {name: Loader}, in the order of interleave().

    counts: number of samples of each loader in a period. An epoch has as many samples as all
    loaders together. Every validation batch is from one loader and equals a validation batch of a
    run with only this source: first all batches of the first loader, then of the next one.
    """

    def __init__(self, loaders, counts):
        sources = list(loaders.values())
        first = sources[0]
        self.loaders = loaders
        self.counts = np.array(counts)
        self.period = sum(counts)
        self.shares = {name: n / self.period for name, n in zip(loaders, counts)}
        self.table = np.array(interleave(counts))  # (period,) source of each place
        self.unit = first.unit
        self.units_per_sample = first.units_per_sample
        self.tensors = first.tensors
        # No row of each source: read() fills up to all widths, whatever else it reads at once.
        self.empty = [[array[:0] for array in loader.read(np.zeros(1, np.int64))]
                      for loader in sources]
        # Each source then reads about one chunk at a time.
        self.calls_per_chunk = sum(x.calls_per_chunk for x in sources[:8])
        if hasattr(first, "n_tokens"):
            self.n_tokens = sum(x.n_tokens for x in sources)
        super().__init__(sum(x.samples for x in sources), 0, first.batch_size,
                         first.val_batch_size, first.seed, first.rank, first.world_size)
        self.fixed_batches = functools.cache(self.fixed_batches)  # called for every batch

    def by_source(self, g):
        """Yield (name, loader, positions, numbers) for each source of samples `g` of the mixture.

        g: indices in the mixture, int64 (m,). Sources without samples in `g` are skipped.
        positions: indices into `g` of the source's samples. numbers: the indices of these samples
        in the source. Both are int64 arrays of the same length.
        """
        periods, place = np.divmod(g, self.period)
        for i, (name, loader) in enumerate(self.loaders.items()):
            positions = np.flatnonzero(self.table[place] == i)
            if positions.size:
                earlier = np.cumsum(self.table == i) - 1  # (period,) places of the source before
                yield name, loader, positions, (
                    periods[positions] * self.counts[i] + earlier[place[positions]])

    def read(self, g):
        parts = [(positions, loader.read(numbers))
                 for _, loader, positions, numbers in self.by_source(g)]
        order = np.argsort(np.concatenate([positions for positions, _ in parts]))
        return [np.concatenate(fill_up(arrays))[order]  # per array of a sample
                for arrays in zip(*self.empty, *(arrays for _, arrays in parts))]

    def describe(self, g):
        return "; ".join(f"{name}: {loader.describe(numbers)}"
                         for name, loader, _, numbers in self.by_source(g))

    def identity(self):
        return {name: loader.fingerprint() for name, loader in self.loaders.items()}

    def passes(self, n):
        """Yield a log line per source: the share, and the epochs in a run that uses `n` samples."""
        for name, loader in self.loaders.items():
            share = self.shares[name]
            yield (f"  {name}: {100 * share:.4g}% of the samples, "
                   f"{share * n / loader.samples:.2f} epochs of {loader.samples:,}")

    # -------------------------------------------------------------------------
    # validation

    def fixed_batches(self, count):
        """Return the validation batches as (source name, index), at most `count` per source."""
        return [(name, i) for name, loader in self.loaders.items()
                for i in range(loader.n_fixed(count))]

    def n_fixed(self, count):
        return len(self.fixed_batches(count))

    def source_of(self, index, count):
        return self.fixed_batches(count)[index][0]

    def fixed_batch(self, index, count, device="cpu"):
        name, i = self.fixed_batches(count)[index]
        return self.loaders[name].fixed_batch(i, count, device)

    def merge(self, sums_by_source):
        """Return the validation sums {name: tensor} of the mixture, from those of each source.

        sums_by_source: {source: {name: tensor}}, with the number of items (e.g. tokens) as "count".
        "count" becomes the total; for other names sum / count (for "exact", if there are "answers":
        sum / answers) is the mean of the sources' values, weighted by the shares.
        """
        n = sum(sums["count"] for sums in sums_by_source.values())
        merged = {}
        for source, sums in sums_by_source.items():
            for key, value in sums.items():
                # An answer of many tokens would otherwise count less than one of few.
                per = "answers" if key in PER_ANSWER and "answers" in sums else "count"
                merged[key] = merged.get(key, 0) + value * (self.shares[source] * n / sums[per])
        return merged


# -----------------------------------------------------------------------------
# the data of a run

def source_name(folder):
    """Return the last part of a data folder's path as a name: data/bin/my-web gives "my_web"."""
    return re.sub(r"\W+", "_", os.path.basename(os.path.abspath(folder))).strip("_")


def mix(data, weights):
    """Return the Data of a mixture of the data sets `data`, {folder: Data}.

    weights: {folder: positive number}. A split (train, val or test) is `None` if a folder lacks it.
    Raises DataError for folders with the same name or no name, a weight too small for one sample
    per period, and folders that check_compatible() refuses.
    """
    folders = {source_name(folder): folder for folder in sorted(data, key=source_name)}
    if len(folders) < len(data) or "" in folders:
        raise DataError(f"data_dir: {', '.join(data)}: numbers are named after the last part of a "
                        "folder, e.g. val_loss_web: expected different names")
    data = {name: data[folder] for name, folder in folders.items()}
    # Rows of conversations are filled up to those of this folder.
    first = max(data, key=lambda name: data[name].spec.get("row_tokens", 0))
    for name in [name for name in data if name != first]:
        check_compatible(folders[first], data[first], folders[name], data[name])
    counts = samples_per_period([weights[folder] for folder in folders.values()])
    if not min(counts):
        raise DataError(f"data_dir: the smallest weight is less than 1 / {MAX_PERIOD:,} of all; "
                        "remove that folder")

    def mixed(split):
        loaders = {name: getattr(d, split) for name, d in data.items()}
        return None if None in loaders.values() else Mixture(loaders, counts)
    shares = ",".join(f"{n}:{c / sum(counts):.9g}" for n, c in zip(data, counts))
    return Data(mixed("train"), mixed("val"), data[first].spec | dict(mixture=shares),
                mixed("test"))


def fill_up(arrays):
    """Return the arrays (m, ..., T) padded with 0 at the end to the largest T; (m,) as they are."""
    if arrays[0].ndim == 1:
        return arrays
    width = max(array.shape[-1] for array in arrays)
    return [np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])
            for array in arrays]


def check_compatible(a, data_a, b, data_b):
    """Raise DataError unless the data sets in folders `a` and `b` can be mixed.

    Samples must have the same shape (except the row lengths of conversations), Data.spec must be
    equal (e.g. the tokenizer), and the model type must support mixtures.
    """
    # An attribute of the model type, e.g. a reward function, belongs to one folder.
    if not hasattr(data_a.train, "read") or vars(data_a).keys() != fields_by_name(Data).keys():
        raise DataError(f"data_dir: {a} and {b}: this model type does not support mixtures; name "
                        "one folder")
    facts_a = describe_samples(data_a)
    facts_b = describe_samples(data_b)
    for name in sorted(facts_a.keys() | facts_b.keys()):
        if facts_a.get(name) != facts_b.get(name):
            raise DataError(
                f"data_dir: {a} and {b} cannot be mixed: {name} is {str(facts_a.get(name))[:80]} "
                f"and {str(facts_b.get(name))[:80]}; prepare both in the same way, one of them "
                "with --tokenizer and the folder of the other")


def describe_samples(data):
    """Return facts {name: value} that must be equal for mixing: Data.spec and shapes of samples."""
    end = -1 if "row_tokens" in data.spec else None  # read() fills up rows of conversations
    shapes = [array.shape[1:end] for array in data.train.read(np.zeros(1, np.int64))]
    return data.spec | dict(row_tokens=None, sample=shapes)
