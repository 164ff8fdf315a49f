"""Several data sets as one: `data_dir: {data/bin/web: 0.7, data/bin/code: 0.3}`.

Sample g of the run belongs to one source, by a table that repeats, and is that source's next
sample, in the order and the epochs that it has by itself. So the order stays a function of (seed,
step), the same at any world size. With shares 0.7 and 0.3 the table is

    g             0    1    2    3    4    5    6    7    8    9    10
    source        web  code web  web  code web  web  web  code web  web
    its sample    0    0    1    2    1    3    4    5    2    6    7
"""

import math
import os
import re
from fractions import Fraction

import numpy as np

from train.base.errors import DataError
from train.dataloader import Data, Loader
from train.evaluate import add_sums

PERIOD = 10_000  # samples after which the table repeats, at most: shares are multiples of 1 / that


def per_period(weights):
    """How many samples of a period are of which source, [int]: its share, exactly where all shares
    are multiples of 1 / n with n up to PERIOD, else rounded to those of 1 / PERIOD."""
    exact = [Fraction(str(w)) for w in weights]  # 0.7 is 7 / 10
    shares = [w / sum(exact) for w in exact]
    period = min(math.lcm(*(s.denominator for s in shares)), PERIOD)
    counts = [math.floor(s * period) for s in shares]
    largest = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * period)
    for i in largest[:period - sum(counts)]:
        counts[i] += 1
    return counts


def assign(counts):
    """Which source has which of the sum(counts) places of a period, [int]. Of the first n places,
    for any n, source i has counts[i] / sum(counts) * n but for at most 1 - 1 / (2 k - 2), k being
    the number of sources, 2 or more: Tijdeman, The chairman assignment problem (1980)."""
    period, k, had, out = sum(counts), len(counts), [0] * len(counts), []
    for n in range(1, period + 1):
        # By how much each one will be behind its share if it gets nothing now, in 1 / period.
        behind = [n * c - period * h for c, h in zip(counts, had)]
        due = [i for i in range(k) if (2 * k - 2) * behind[i] >= period]
        # Among these the one that would first be behind by too much.
        first = min(due, key=lambda i: ((2 * k - 3) * period - (2 * k - 2) * behind[i]) / counts[i])
        had[first] += 1
        out.append(first)
    return out


class Mixture(Loader):
    """Samples of several loaders, {name: loader}, counts[i] of the i-th in a period.

    samples: of all of them together, and so an epoch. A batch of validation is of one source, in
    the order of their names: each is evaluated on what it would be evaluated on by itself."""

    def __init__(self, loaders, counts):
        a = next(iter(loaders.values()))
        self.loaders, self.counts, self.period = loaders, np.array(counts), sum(counts)
        self.shares = {name: n / self.period for name, n in zip(loaders, counts)}
        self.table = np.array(assign(counts))  # (period,) the source of each place
        before = np.eye(len(counts), dtype=np.int64)[self.table].cumsum(0) - 1  # (period, k)
        self.before = before[np.arange(self.period), self.table]  # places of the same, before it
        self.unit, self.units_per_sample, self.tensors = a.unit, a.units_per_sample, a.tensors
        # So that what each source then reads at once is about a chunk of its own.
        self.calls_per_chunk = sum(x.calls_per_chunk for x in [*loaders.values()][:8])
        if hasattr(a, "n_tokens"):
            self.n_tokens = sum(x.n_tokens for x in loaders.values())
        super().__init__(sum(x.samples for x in loaders.values()), 0, a.batch_size,
                         a.val_batch_size, a.seed, a.rank, a.world_size)

    def by_source(self, g):
        """(name, loader, where in g its samples are, their numbers there) of each source that
        samples g (m,) are of."""
        periods, place = np.divmod(g, self.period)
        source = self.table[place]
        own = periods * self.counts[source] + self.before[place]
        for i, (name, loader) in enumerate(self.loaders.items()):
            at = np.flatnonzero(source == i)
            if at.size:
                yield name, loader, at, own[at]

    def read(self, g):
        found, out = [(at, loader.read(own)) for _, loader, at, own in self.by_source(g)], []
        for parts in zip(*(arrays for _, arrays in found)):  # of each array that a sample has
            out.append(np.empty((len(g), *parts[0].shape[1:]), np.result_type(*parts)))
            for (at, _), part in zip(found, parts):
                out[-1][at] = part
        return out

    def describe(self, g):
        return "; ".join(f"{name}: {loader.describe(own)}"
                         for name, loader, _, own in self.by_source(g))

    def identity(self):
        return {name: loader.fingerprint() for name, loader in self.loaders.items()}

    def passes(self, n):
        """A line for each source: its share, and how often a run of n samples sees it."""
        for name, loader in self.loaders.items():
            share = self.shares[name]
            yield (f"  {name}: {100 * share:.4g}% of them, {share * n / loader.samples:.2f} passes "
                   f"over {loader.samples:,}")

    # -------------------------------------------------------------------------
    # validation

    def fixed(self, index, count):
        """(name, loader, index there) of batch `index` of `count` batches of each source."""
        for name, loader in self.loaders.items():
            if index < (n := loader.n_fixed(count)):
                return name, loader, index
            index -= n
        raise IndexError(f"fixed batch {index} too many")

    def n_fixed(self, count):
        return sum(loader.n_fixed(count) for loader in self.loaders.values())

    def source_of(self, index, count):
        return self.fixed(index, count)[0]

    def fixed_batch(self, index, count, device="cpu"):
        _, loader, own = self.fixed(index, count)
        return loader.fixed_batch(own, count, device)

    def weigh(self, sums):
        """Sums over all sources of {name: sums}, the items of each weighing as much as its share.
        """
        n, out = sum(s["count"] for s in sums.values()), {}
        for name, share in self.shares.items():
            factor = share * n / sums[name]["count"]
            add_sums(out, {key: value * factor for key, value in sums[name].items()})
        return out


# -----------------------------------------------------------------------------
# the data of a run

def source_name(folder):
    """What a source is called in numbers: data/bin/web is web."""
    return re.sub(r"\W+", "_", os.path.basename(os.path.abspath(folder))).strip("_")


def mix(data, weights):
    """The Data of a mixture of {folder: Data}, whose sources weigh {folder: weight}. Raises
    DataError where they cannot be mixed."""
    folders = {source_name(folder): folder for folder in sorted(data, key=source_name)}
    if len(folders) < len(data) or folders.keys() & {"", "ema", *(f"{n}_ema" for n in folders)}:
        raise DataError(f"data_dir: {', '.join(data)}: numbers are called by the last part of a "
                        "folder's name, val_loss_web, say: expected different ones, not ema, and "
                        "no web_ema beside web")
    data = {name: data[folder] for name, folder in folders.items()}
    first, *others = data
    for name in others:
        check_alike(folders[first], data[first], folders[name], data[name])
    counts = per_period([weights[folder] for folder in folders.values()])
    if not min(counts):
        raise DataError(f"data_dir: the smallest weight is less than 1 / {PERIOD:,} of all; leave "
                        "its folder out")

    def mixed(split):
        loaders = {name: getattr(d, split) for name, d in data.items()}
        return None if None in loaders.values() else Mixture(loaders, counts)
    shares = ",".join(f"{n}:{c / sum(counts):.9g}" for n, c in zip(data, counts))
    return Data(mixed("train"), mixed("val"), data[first].spec | dict(mixture=shares),
                mixed("test"), data[first].renamed)


def check_alike(a, one, b, other):
    """DataError unless the Data of folders a and b can be mixed."""
    if not hasattr(one.train, "read"):
        raise DataError(f"data_dir: {a} and {b}: this model reads no mixture; name one folder")
    one, other = ({"sample": [array.shape[1:] for array in d.train.read(np.zeros(1, np.int64))]}
                  | d.spec for d in (one, other))
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            raise DataError(
                f"data_dir: {a} and {b} cannot be mixed: {name} is {str(one.get(name))[:80]} and "
                f"{str(other.get(name))[:80]}; prepare both alike, one with --tokenizer and the "
                "other's folder")
