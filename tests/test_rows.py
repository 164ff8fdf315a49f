"""Rows of arrays as batches: the loader of most systems (train/dataloader.py's RowLoader)."""

import types

import numpy as np
import pytest
import torch

from data.rows import open_rows, split_by_prompt
from train import dataloader
from train.base.errors import DataError
from train.config import TrainConfig
from train.dataloader import RowLoader


def loader(arrays, batch_size=6, accumulation=1, rank=0, world=1, seed=7):
    config = TrainConfig(batch_size=batch_size, gradient_accumulation_steps=accumulation, seed=seed)
    return RowLoader(arrays, config, types.SimpleNamespace(rank=rank, world_size=world))


@pytest.fixture
def arrays(tmp_path):
    """23 rows: numbers of the rows in three types and shapes, the last one memory-mapped."""
    np.save(tmp_path / "x.npy", np.arange(46, dtype="float32").reshape(23, 2))
    return [np.arange(23, dtype="u1"), np.arange(23) % 2 == 0, np.arange(23, dtype="int32"),
            np.load(tmp_path / "x.npy", mmap_mode="r")]


def test_a_batch_is_rows_of_every_array_in_its_type(arrays):
    rows = loader(arrays)
    assert (rows.samples, rows.unit, rows.units_per_sample) == (23, "row", 1)
    for step in (0, 3, 50):
        number, even, same, x = rows.get_batch("cpu", step)
        assert [t.dtype for t in (number, even, same, x)] == [torch.int64, torch.bool, torch.int32,
                                                             torch.float32]
        assert len(number) == 6 and torch.equal(even, number % 2 == 0)
        assert torch.equal(same.long(), number) and torch.equal(x, torch.stack(
            (2 * number, 2 * number + 1), 1).float())
        assert rows.locate(step) == f"rows {', '.join(str(int(n)) for n in number)}"
    assert torch.equal(rows.get_batch()[0], rows.get_batch("cpu", 0)[0])


def test_an_epoch_has_every_row_once_in_its_own_order(arrays):
    rows = loader(arrays[:1], batch_size=23)
    epochs = [rows.get_batch("cpu", step)[0].tolist() for step in range(4)]
    assert all(sorted(e) == list(range(23)) for e in epochs) and len(set(map(tuple, epochs))) == 4
    assert loader(arrays[:1], batch_size=23, seed=8).get_batch()[0].tolist() not in epochs


@pytest.mark.parametrize("world, accumulation", [(2, 1), (3, 1), (6, 1), (1, 2), (2, 2)])
def test_ranks_and_micro_batches_share_the_rows_of_one_batch(arrays, world, accumulation):
    whole = loader(arrays, batch_size=12)
    ranks = [loader(arrays, 12 // accumulation, accumulation, rank, world)
             for rank in range(world)]
    n = TrainConfig(batch_size=12 // accumulation,
                    gradient_accumulation_steps=accumulation).accumulation(world)
    for step in range(5):
        parts = [r.get_batch("cpu", step * n + micro) for micro in range(n) for r in ranks]
        for i, expected in enumerate(whole.get_batch("cpu", step)):
            assert torch.equal(torch.cat([p[i] for p in parts]), expected)


@pytest.mark.parametrize("count, sizes", [(1, [6]), (3, [6, 6, 6]), (4, [6, 6, 6, 5]),
                                          (90, [6, 6, 6, 5])])
def test_fixed_batches_are_spread_and_end_with_a_smaller_one(arrays, count, sizes):
    for rows in (loader(arrays), loader(arrays, 6, 2, 1, 2, seed=9)):  # of any rank and seed
        assert rows.n_fixed(count) == len(sizes)
        batches = [rows.fixed_batch(i, count) for i in range(len(sizes))]
        numbers = torch.cat([b[0] for b in batches])
        assert [len(b[0]) for b in batches] == sizes
        n = sum(sizes)
        assert numbers.tolist() == [i * 23 // n for i in range(n)]  # evenly, from the first row
        assert torch.equal(torch.cat([b[3] for b in batches])[:, 0], 2.0 * numbers)
    for index in (-1, len(sizes)):
        with pytest.raises(IndexError):
            rows.fixed_batch(index, count)


def test_what_tells_rows_from_others(arrays, monkeypatch):
    first = loader(arrays).fingerprint()
    assert first == loader(arrays, 3, seed=1).fingerprint()
    assert first["arrays"] == [[[23], "uint8"], [[23], "bool"], [[23], "int32"],
                               [[23, 2], "float32"]]
    rows = loader(arrays)
    rows.fingerprint()["arrays"] = 0  # a copy: the known one stays
    assert rows.fingerprint() == first
    for i in (0, 22, 11):
        changed = arrays[2].copy()
        changed[i] += 1
        assert loader([*arrays[:2], changed, arrays[3]]).fingerprint() != first
    monkeypatch.setattr(dataloader, "MIB", 8)  # two rows of int32, one of two floats
    short = loader(arrays).fingerprint()
    for i, seen in ((0, True), (1, True), (2, False), (20, False), (21, True), (22, True)):
        changed = arrays[2].copy()
        changed[i] += 1
        other = loader([*arrays[:2], changed, arrays[3]]).fingerprint()
        assert (other != short) is seen, i
    monkeypatch.setattr(dataloader, "MIB", 1)  # less than a row: one is looked at
    wide = np.zeros((5, 4))
    assert loader([wide]).fingerprint() != loader([wide + np.eye(5, 4)]).fingerprint()


@pytest.mark.parametrize("lengths", [[], [0], [3, 4], [0, 3]])
def test_nothing_or_unequal_lengths_are_refused(lengths):
    with pytest.raises(DataError, match="the same length, above 0"):
        loader([np.zeros(n) for n in lengths])


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.5])
def test_a_prompt_is_in_one_split_whatever_else_is_prepared(fraction):
    def sample(i):  # two answers to each prompt
        ids = np.array([i // 2 % 256, i // 512, 7, i % 2], np.uint16)
        return (ids, np.array([0, 0, 1, 1])), i

    def prompts(samples):
        return {(ids[0], ids[1]) for (ids, _), _ in samples}
    splits = split_by_prompt([sample(i) for i in range(2000)], fraction)
    train, val = (prompts(splits[name]) for name in ("train", "val"))
    assert len(train) + len(val) == len(train | val) == 1000
    assert len(val) == 1 if fraction < 0.01 else abs(len(val) / 1000 - fraction) < 0.05
    assert [i for _, i in splits["val"]] == sorted(i for _, i in splits["val"])
    more = split_by_prompt([sample(i) for i in range(3000)], fraction)
    assert fraction < 0.01 or prompts(more["val"]) > val
    assert split_by_prompt([], fraction) == dict(train=[], val=[])


def test_a_greeting_that_all_conversations_share_does_not_decide_the_split():
    mask = np.array([0, 0, 1, 0, 0, 1])  # the assistant begins
    samples = [((np.array([1, 2, 7, i % 500, 3, 9]), mask),) for i in range(1000)]
    splits = split_by_prompt(samples, 0.1)
    questions = [{ids[3] for (ids, _), in part} for part in splits.values()]
    assert not questions[0] & questions[1] and 80 < len(splits["val"]) < 120


@pytest.mark.parametrize(("array", "message"), [
    (np.zeros((4, 3), "u2"), r"uint16 of shape \(4, 3\); expected n x 2 integers from 1 to 8"),
    (np.ones((4, 2), "f4"), "float32 of shape .*; expected n x 2 integers from 1 to 8"),
    (np.array([[1, 9]]), "expected n x 2 integers from 1 to 8; prepare the data again")])
def test_arrays_that_do_not_fit_are_described(tmp_path, array, message):
    np.save(tmp_path / "train_a.npy", array)
    with pytest.raises(DataError, match=f"train_a.npy: .*{message}"):
        open_rows(str(tmp_path), "train", a=((2,), 1, 9))
    np.save(tmp_path / "train_a.npy", np.array([[1, 8]]))
    assert open_rows(str(tmp_path), "train", a=((2,), 1, 9))[0].tolist() == [[1, 8]]
