"""The loader: the order of the data, every format, every kind of bad file, files that change."""

import json
import os
import pickle
import re
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from processes import python

from data import token_files
from data.token_files import find_files, open_stream
from train import dataloader
from train.base.errors import DataError
from train.config import TrainConfig
from train.dataloader import DataLoader, Prefetcher, RowLoader, permute, window_starts
from train.distributed import Ranks


def write(path, tokens, dtype="<u2"):
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


def llmc(path, tokens, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens).astype(dtype).tobytes())
    return path


def stream(n, high=50_000, seed=0):
    return np.random.default_rng(seed).integers(0, high, n)


def batches(loader, steps):
    return torch.stack([torch.stack(loader.get_batch(step=s)) for s in steps])


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.bin", stream(5000))
    write(tmp_path / "val.bin", stream(900, seed=1))
    return tmp_path


# --- the order

@pytest.mark.matrix(56)
def test_the_order_of_the_data_never_changes():
    """The order is frozen: a change here changes every run that is resumed."""
    assert window_starts(np.arange(12), 1000, 16, 1337).tolist() == [
        869, 149, 853, 245, 453, 341, 389, 69, 549, 421, 5, 133]
    assert window_starts(np.arange(3, 15), 101, 32, 42).tolist() == [
        51, 61, 29, 0, 32, 55, 23, 33, 1, 53, 21, 42]  # two windows an epoch: many epochs at once
    assert window_starts(10**10 + np.arange(4), 5 * 10**11, 1024, 7).tolist() == [
        170722360072, 116512864008, 93826362120, 319344323336]


@pytest.mark.parametrize("n", [*range(1, 60), 1000, 4096, 4097, 99_991])
def test_permutation_is_a_bijection(n):
    keys = [dataloader.hash64(n, np.full(n, 3, np.uint64), lane) for lane in range(1, 7)]
    out = permute(np.arange(n, dtype=np.uint64), n, keys)
    assert np.array_equal(np.sort(out), np.arange(n))
    if n >= 1000:
        assert (out == np.arange(n)).sum() < 12 and abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.2


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_each_window_is_as_likely_at_each_place(n):
    epochs = 20_000
    windows = window_starts(np.arange(n * epochs), n + 2, 1, 3).reshape(epochs, n)
    counts = np.array([[(windows[:, i] == w).sum() for w in range(n)] for i in range(n)])
    assert np.abs(counts / epochs * n - 1).max() < 0.1


def test_each_window_once_an_epoch_with_a_new_phase_and_order():
    n_tokens, size, seed = 16 * 103 + 7, 16, 5
    n = dataloader.count_windows(n_tokens, size)
    epochs = window_starts(np.arange(8 * n), n_tokens, size, seed).reshape(8, n)
    for starts in epochs:
        assert np.array_equal(np.sort(starts), starts.min() + size * np.arange(n))
        assert 0 <= starts.min() < size and starts.max() + size < n_tokens
    assert len(set(epochs.min(1))) > 3
    assert len({tuple(np.argsort(e)) for e in epochs}) == 8


@pytest.mark.parametrize("n_tokens", [17, 18, 31, 32, 33, 47, 48, 49, 65])
def test_windows_stay_inside_small_streams(n_tokens):
    starts = window_starts(np.arange(500), n_tokens, 16, 0)
    assert starts.min() >= 0 and starts.max() + 16 < n_tokens
    assert n_tokens == 17 or len(set(starts)) > 1


def test_batch_is_a_function_of_seed_and_step(folder):
    a, b = (DataLoader(folder, 4, 32, seed=9) for _ in range(2))
    forward = batches(a, range(200))
    order = np.random.default_rng(0).permutation(200)
    assert torch.equal(forward[order], batches(b, order))
    assert not torch.equal(forward, batches(DataLoader(folder, 4, 32, seed=10), range(200)))
    assert not torch.equal(forward, batches(DataLoader(folder, 4, 32, seed=9 + 2**32), range(200)))


def test_batch_holds_the_windows_of_the_file(folder):
    tokens, loader = np.fromfile(folder / "train.bin", "<u2"), DataLoader(folder, 4, 32)
    for step in range(60):
        x, y = loader.get_batch()
        assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
        for i, start in enumerate(loader.positions(loader.sample_numbers([step]))):
            assert np.array_equal(x[i], tokens[start:start + 32])
            assert np.array_equal(y[i], tokens[start + 1:start + 33])
    assert loader.step == 60
    assert loader.samples * loader.units_per_sample == 155 * 32  # of 156 that fit


@pytest.mark.matrix(42)
def test_the_stream_goes_on_from_any_step(folder, monkeypatch):
    monkeypatch.setattr(dataloader, "CHUNK_TOKENS", 4 * 32 * 7)
    whole, resumed = DataLoader(folder, 4, 32), DataLoader(folder, 4, 32)
    expected = [whole.get_batch() for _ in range(50)]
    resumed.step = 23
    for x, y in expected[23:]:
        assert all(map(torch.equal, resumed.get_batch(), (x, y)))
    x, _ = resumed.get_batch(step=3)  # a look elsewhere does not move the counter
    assert torch.equal(x, expected[3][0]) and resumed.step == 50


@pytest.mark.matrix(53)
@pytest.mark.parametrize("world,accumulation", [(1, 2), (2, 1), (2, 3), (3, 1), (3, 2), (4, 1),
                                                (4, 3), (1, 12), (12, 1)])
def test_global_batches_do_not_depend_on_the_world_size(folder, world, accumulation):
    def steps(world, accumulation):
        ranks = [DataLoader(folder, 12 // (world * accumulation), 32, rank=r, world_size=world)
                 for r in range(world)]
        return [torch.cat([torch.stack(r.get_batch(), 1)
                           for _ in range(accumulation) for r in ranks]) for _ in range(50)]
    assert all(map(torch.equal, steps(world, accumulation), steps(1, 1)))


# --- fixed batches

@pytest.mark.parametrize("count", [1, 3, 5, 6, 7, 100])
def test_fixed_batches_are_spread_without_overlap(folder, count):
    loader = DataLoader(folder, 5, 32, "val")  # 28 windows fit: 5 full batches and 3 windows
    reads, rows = [], loader.rows
    loader.rows = lambda positions: reads.append(positions) or rows(positions)
    read = [loader.fixed_batch(i, count) for i in range(loader.n_fixed(count))]
    starts = np.concatenate(reads)
    assert len(starts) == min(5 * count, 28) and loader.n_fixed(count) == min(count, 6)
    assert (np.diff(starts) >= 32).all() and starts[0] == 0 and starts[-1] + 32 < 900
    if count > 1:
        assert starts[-1] > 900 - 32 * 3
    tokens = np.fromfile(folder / "val.bin", "<u2")
    x, y = (torch.cat(part).numpy() for part in zip(*read))
    assert np.array_equal(x, [tokens[s:s + 32] for s in starts])
    assert np.array_equal(y, [tokens[s + 1:s + 33] for s in starts])
    assert len(read[-1][0]) == (3 if count > 5 else 5)
    with pytest.raises(IndexError):
        loader.fixed_batch(loader.n_fixed(count), count)


def test_fixed_batches_are_the_same_for_every_rank_and_seed(folder):
    a = DataLoader(folder, 5, 32, "val")
    b = DataLoader(folder, 5, 32, "val", seed=3, rank=2, world_size=3)
    b.get_batch()
    assert all(torch.equal(a.fixed_batch(i, 4)[0], b.fixed_batch(i, 4)[0]) for i in range(4))


# --- formats

def read_all(path, n, **kwargs):
    return DataLoader(path, 1, n - 1, **kwargs).stream.read(np.array([0]), n)[0]


def test_formats_give_the_same_stream(tmp_path):
    tokens = stream(3000)
    parts = [tokens[:1000], tokens[1000:1010], tokens[1010:]]  # windows span up to three shards
    for kind in ("raw", "raw32", "llmc", "llmc32", "npy", "npy32", "npy64"):
        (tmp_path / kind).mkdir()
        for i, part in enumerate(parts):
            path = tmp_path / kind / f"x_train_{i:06d}.bin"
            dtype = {"32": "<u4", "64": "<i8"}.get(kind[-2:], "<u2")
            if kind.startswith("raw"):
                write(path, part, dtype)
            elif kind == "llmc":
                llmc(path, part)
            elif kind == "llmc32":
                llmc(path, part, 20240801, 7, "<u4")
            else:
                np.save(path.with_suffix(".npy"), part.astype(dtype))
        llmc(tmp_path / kind / "x_val_000000.bin", tokens[:99])
        if kind == "raw32":
            (tmp_path / kind / "meta.json").write_text('{"dtype": "uint32"}')
    write(tmp_path / "one.bin", tokens)
    expected = DataLoader(tmp_path / "one.bin", 8, 64)
    assert expected.n_tokens == 3000 and expected.dtype == "uint16"
    assert isinstance(read_all(tmp_path / "one.bin", 3000), np.ndarray)
    for kind in ("raw", "raw32", "llmc", "llmc32", "npy", "npy32", "npy64"):
        loader = DataLoader(tmp_path / kind, 8, 64, vocab_size=50_000)
        assert torch.equal(batches(loader, range(40)), batches(expected, range(40))), kind
        assert np.array_equal(read_all(tmp_path / kind, 3000), tokens), kind


def test_files_in_several_folders_are_read_as_their_own_meta_json_says(tmp_path):
    """That of the first folder alone would read uint32 as twice as many ids of uint16."""
    for name, dtype, splits in (("a1", "uint16", {"train": {"tokens": 100}}),
                                ("a2", "uint16", {"train": {"tokens": 100}}), ("b1", "uint32", {})):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.bin", stream(100), dtype)
        (tmp_path / name / "meta.json").write_text(json.dumps(dict(dtype=dtype, splits=splits)))
    assert open_stream(f"{tmp_path}/a*/{{split}}.bin", "train").n_tokens == 200
    with pytest.raises(DataError, match="different types: uint16, uint32"):
        open_stream(f"{tmp_path}/*1/{{split}}.bin", "train")


def test_folder_file_glob_and_split(folder, tmp_path):
    tokens = np.fromfile(folder / "train.bin", "<u2")
    write(folder / "more_train.bin", tokens[::-1])  # train.bin alone counts where it stands
    for path in (folder, str(folder), folder / "train.bin", f"{folder}/t*n.bin",
                 f"{folder}/{{split}}.bin"):
        assert np.array_equal(read_all(path, 5000), tokens)
    val = np.fromfile(folder / "val.bin", "<u2")
    assert np.array_equal(read_all(f"{folder}/{{split}}.bin", 900, split="val"), val)
    odd = tmp_path / "odd [1]*"  # characters that mean something in a pattern
    odd.mkdir()
    write(odd / "train.bin", tokens)
    assert np.array_equal(read_all(odd, 5000), tokens)


def test_a_split_inside_a_word_names_no_shard(folder, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("medieval_train_000", "medieval_val_000", "x-val", "constraint"):
        shutil.copy(folder / "val.bin", shards / f"{name}.bin")
    assert [os.path.basename(path) for path in find_files(str(shards), "val")] == [
        "medieval_val_000.bin", "x-val.bin"]
    assert len(find_files(str(shards), "train")) == 1


def test_vocabulary_comes_from_the_data(folder):
    assert DataLoader(folder, 1, 8).vocab_size is None
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50_001, "itos": {0: "a"}}))
    assert DataLoader(folder, 1, 8).vocab_size == 50_001
    (folder / "meta.json").write_text(json.dumps({"vocab_size": 50_002, "dtype": "uint16"}))
    assert DataLoader(folder, 1, 8).vocab_size == 50_002
    assert DataLoader(folder, 1, 8, vocab_size=60_000).vocab_size == 60_000


@pytest.mark.matrix(27)
def test_meta_pkl_runs_no_code(folder):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Evil()}))
    with pytest.raises(DataError, match=r"meta.pkl: .*mkdir"):
        DataLoader(folder, 1, 8)
    assert not (folder / "ran").exists()


def test_windows_over_many_shards(tmp_path):
    tokens = stream(2000)
    for i in range(20):
        write(tmp_path / f"train_{i:02}.bin", tokens[i * 100:i * 100 + 100])
    data, starts = open_stream(tmp_path, "train"), np.random.default_rng(0).integers(0, 1650, 99)
    assert np.array_equal(data.read(starts, 350), tokens[starts[:, None] + np.arange(350)])
    folder = tmp_path / "short"  # more files in a window than Python's limit of recursion
    folder.mkdir()
    for i in range(1100):
        write(folder / f"train_{i:04}.bin", tokens[i:i + 1])
    assert np.array_equal(open_stream(folder, "train").read([20], 1050)[0], tokens[20:1070])


def test_the_dtype_in_meta_json_is_not_doubted(tmp_path):
    """Every second base is an A: as uint32, all of it would be small numbers."""
    write(tmp_path / "train.bin", [3, 0] * 500)
    (tmp_path / "meta.json").write_text('{"dtype": "uint16"}')
    assert open_stream(tmp_path, "train").n_tokens == 1000


def test_empty_shards_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no tokens"):
        DataLoader(llmc(tmp_path / "x.bin", []), 1, 8)


def test_fingerprint(folder, monkeypatch):
    first = DataLoader(folder, 1, 8).fingerprint()
    tokens = np.fromfile(folder / "train.bin", "<u2")
    assert first["tokens"] == 5000 and first["bytes"] == 10_000 and first["dtype"] == "uint16"
    assert json.loads(json.dumps(first)) == first == DataLoader(folder, 3, 9).fingerprint()
    monkeypatch.setattr(dataloader, "MIB", 1000)  # now the shard is longer than its two ends
    first = DataLoader(folder, 1, 8).fingerprint()
    for changed in (np.append(tokens, 1), tokens ^ (np.arange(5000) == 0).astype("u2"),
                    tokens ^ (np.arange(5000) == 4999).astype("u2")):
        write(folder / "train.bin", changed)
        assert DataLoader(folder, 1, 8).fingerprint() != first


@pytest.mark.matrix(52)
def test_grown_data_is_detected_and_meta_json_knows_the_count(folder):
    meta = {"splits": {"train": {"tokens": 5000}, "val": {"tokens": 900}}}
    (folder / "meta.json").write_text(json.dumps(meta))
    DataLoader(folder, 1, 8)
    os.truncate(folder / "train.bin", 9000)
    with pytest.raises(DataError, match="4,500 tokens, but meta.json says 5000"):
        DataLoader(folder, 1, 8)
    for splits in (["train", "val"], {"train": 4500}, {"train": None}):  # of another program
        (folder / "meta.json").write_text(json.dumps(dict(splits=splits)))
        DataLoader(folder, 1, 8)


# --- bad files, found before work starts: matrix F

IDS = stream(2000).astype("<u2")


def put(path, content):
    path.write_bytes(content)
    return path


def npy(path, array):
    with open(path, "wb") as f:
        np.save(f, array)
    return path


def cut(path, n_bytes):
    os.truncate(path, path.stat().st_size - n_bytes)
    return path


def folder_with(path, *folders):
    path.mkdir()
    for name in folders:
        (path / name).mkdir()
    return path


BAD = [  # case, what is at this path, what the message says
    ("79 missing", lambda p: p, "x.bin: no such file.*-m data.prepare"),
    ("79 glob", lambda p: f"{p}*", "no such file or folder; set"),
    ("79 folder", folder_with, "expected train.bin, .* found nothing.*-m data.prepare"),
    ("80 empty", lambda p: put(p, b""), "x.bin: holds no tokens"),
    ("81 odd byte count", lambda p: cut(write(p, IDS), 1), "3,999 bytes, .* of uint16: cut sho"),
    ("82 short", lambda p: write(p, IDS[:16]), "x.bin: 16 tokens, but block_size 16 needs 17"),
    ("85 directory", lambda p: folder_with(p, "train.bin"), "train.bin: cannot be read: Is a dir"),
    ("87 uint32", lambda p: write(p, IDS, "<u4"), "looks like uint32 tokens read as uint16"),
    ("87 large ids", lambda p: write(p, stream(500, 150_000), "<u4"), "looks like uint32 tokens"),
    ("87 bin named npy", lambda p: write(p.with_suffix(".npy"), IDS), "cannot be read as a .npy"),
    ("87 text", lambda p: put(p, b"To be, or not to be.\n" * 9), "is text, not tokens; .*prepare"),
    ("87 floats", lambda p: npy(p.with_suffix(".npy"), np.ones(99)), "float64 of shape"),
    ("87 table", lambda p: npy(p.with_suffix(".npy"), IDS.reshape(2, -1)), "of shape .2, 1000."),
    ("87 objects", lambda p: npy(p.with_suffix(".npy"), np.array([{}, None])), "Python objects"),
    ("87 broken npy", lambda p: put(p.with_suffix(".npy"), b"\x93NUMPY\1\0zz"), "x.npy: "),
    ("87 version", lambda p: llmc(p, IDS, version=2), "version 2 of llm.c's shards is unknown"),
    ("88 npy cut short", lambda p: cut(npy(p.with_suffix(".npy"), IDS), 4), "x.npy: .* cut short"),
    ("88 shard cut short", lambda p: llmc(p, IDS, count=2001), "is 5,024 bytes, expected 5,026"),
    ("88 shard too long", lambda p: llmc(p, IDS, count=1999), "5,022 for 1,999 tokens"),
    ("88 only a header", lambda p: cut(llmc(p, IDS), 5000), "is 24 bytes, expected 5,024"),
]


@pytest.mark.matrix(79, 80, 81, 82, 83, 84, 85, 86, 87, 88)
@pytest.mark.parametrize("case,build,message", BAD, ids=[case for case, *_ in BAD])
def test_bad_files_are_refused(tmp_path, case, build, message):
    path = build(tmp_path / "x.bin")
    with pytest.raises(DataError, match=message) as error:
        DataLoader(path, 1, 16)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


@pytest.mark.matrix(83)
def test_missing_validation_data_are_named(folder):
    os.remove(folder / "val.bin")
    with pytest.raises(DataError, match=r"no val data: expected val.bin.*found train.bin"):
        DataLoader(folder, 1, 8, "val")
    with pytest.raises(DataError, match="is training data only"):  # not validated on silently
        DataLoader(folder / "train.bin", 1, 8, "val")


@pytest.mark.matrix(84)
def test_unreadable_data_are_named(folder, monkeypatch):
    def denied(path, mode):
        raise PermissionError(13, "Permission denied", path)
    monkeypatch.setattr(token_files, "open", denied, raising=False)
    with pytest.raises(DataError, match="train.bin: cannot be read: Permission denied"):
        DataLoader(folder, 1, 8)


@pytest.mark.matrix(86)
@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_a_token_outside_the_vocabulary_is_refused(folder, place):
    tokens = np.fromfile(folder / "train.bin", "<u2")
    tokens[place] = 50_000
    write(folder / "train.bin", tokens)
    message = f"train.bin: token 50000 at offset {place:,} is outside the vocabulary of 50,000"
    with pytest.raises(DataError, match=message):
        DataLoader(folder, 4, 32, vocab_size=50_000)
    DataLoader(folder, 4, 32, vocab_size=50_001)


@pytest.mark.matrix(86)
def test_a_bad_token_is_named_before_a_device_sees_it(tmp_path, monkeypatch):
    tokens, seen, send = np.zeros(1_300_000, "<u2"), [], dataloader.send
    monkeypatch.setattr(dataloader, "send",
                        lambda t, device: seen.append(t.max()) or send(t, device))
    monkeypatch.setattr(token_files, "CHECKED_WHOLE", 0)
    tokens[650_003] = 777  # not among the places looked at when opening
    write(tmp_path / "train_0.bin", tokens[:600_001])
    write(tmp_path / "train_1.bin", tokens[600_001:])
    loader = DataLoader(tmp_path, 8, 64, vocab_size=300)
    with pytest.raises(DataError, match="train_1.bin: token 777 at offset 50,002 is outside"):
        for _ in range(1_300_000 // (8 * 64)):
            loader.get_batch()
    assert seen and max(seen) == 0


def test_negative_ids_and_mixed_types_are_refused(tmp_path):
    np.save(tmp_path / "train_a.npy", np.arange(-1, 99))
    with pytest.raises(DataError, match="token -1 at offset 0 is outside the vocabulary"):
        DataLoader(tmp_path, 1, 8)
    np.save(tmp_path / "train_b.npy", np.arange(99, dtype="u2"))
    with pytest.raises(DataError, match="different types: int64, uint16"):
        DataLoader(tmp_path, 1, 8)


@pytest.mark.parametrize("content,message", [
    ("[]", "holds a list"), ("{", "meta.json: "), ('{"dtype": "uint32"}', "or meta.json's dtype"),
    ('{"dtype": "float32"}', "dtype is 'float32'"), ('{"vocab_size": "ab"}', "vocab_size is 'ab'")])
def test_bad_meta_json_is_refused(folder, content, message):
    (folder / "meta.json").write_text(content)
    with pytest.raises(DataError, match=message):
        DataLoader(folder, 1, 8)


@pytest.mark.parametrize("arguments", [(0, 8), (1, 0), (1, 8, "train", 1, 2, 2)])
def test_impossible_shapes_are_refused(folder, arguments):
    with pytest.raises(DataError, match="expected"):
        DataLoader(folder, *arguments)
    with pytest.raises(DataError, match="step -1"):
        DataLoader(folder, 1, 8).get_batch(step=-1)


# --- files that change or fail while they are read

@pytest.mark.matrix(88)
def test_data_truncated_while_running_are_an_error_not_a_signal(tmp_path):
    path = tmp_path / "train.bin"
    with open(path, "wb") as f:
        f.truncate(100 << 20)  # really large, so that nothing needs to be patched
    program = f"""
import os
from train.dataloader import DataError, DataLoader
loader = DataLoader({str(path)!r}, 64, 1024)
loader.get_batch()
os.truncate({str(path)!r}, 4096)
try:
    for _ in range(40):
        loader.get_batch()
except DataError as error:
    print("DataError:", error)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "train.bin: changed during the run" in done.stdout


@pytest.mark.matrix(88)
@pytest.mark.parametrize("change", ["replaced", "written to", "cut short", "removed"])
def test_data_changed_while_running_are_noticed(folder, change):
    loader = DataLoader(folder, 4, 32)
    loader.get_batch()
    path, other = folder / "train.bin", write(folder / "other", stream(5000, seed=8))
    if change == "replaced":
        os.replace(other, path)
    elif change == "written to":
        with open(path, "r+b") as f:
            f.write(b"xx")
        os.utime(path, ns=(1, 1))  # clocks of file systems can be coarser than this test
    elif change == "cut short":
        os.truncate(path, 100)
    else:
        os.remove(path)
    with pytest.raises(DataError, match="train.bin: .*; put the old file back, resume"):
        loader.get_batch(step=10_000)


# --- large files

def sparse(path, n_bytes):
    try:
        with open(path, "wb") as f:
            f.truncate(n_bytes)
    except OSError:
        pytest.skip("this file system has no files of this size")
    return path


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")


@pytest.mark.matrix(90)
def test_more_than_4g_tokens_are_read(tmp_path):
    path, n = sparse(tmp_path / "train.bin", 10 * 10**9), 5 * 10**9
    starts = window_starts(np.arange(160), n, 256, 1337)  # 20 calls of 8
    far = int(np.argmax(starts))
    assert starts[far] > 2**32
    with open(path, "r+b") as f:
        f.seek(2 * int(starts[far]))
        f.write(np.arange(1, 258, dtype="<u2").tobytes())
    loader = DataLoader(path, 8, 256)
    assert loader.n_tokens == n
    x, y = loader.get_batch(step=far // 8)
    assert torch.equal(x[far % 8], torch.arange(1, 257))
    assert torch.equal(y[far % 8], torch.arange(2, 258))
    assert x.sum() == torch.arange(1, 257).sum()
    with open(path, "r+b") as f:
        f.seek(2 * int(starts[far] + 200))
        f.write(b"\xff\xff")
    with pytest.raises(DataError, match=f"token 65535 at offset {starts[far] + 200:,} is outside"):
        DataLoader(path, 8, 256, vocab_size=50_257).get_batch(step=far // 8)


@pytest.mark.matrix(90)
@needs_proc
def test_memory_is_flat_over_10_000_batches_of_a_terabyte(tmp_path, monkeypatch):
    monkeypatch.setattr(dataloader, "CHUNK_TOKENS", 1 << 18)  # as in a run, not as in tests
    loader = DataLoader(sparse(tmp_path / "train.bin", 10**12), 12, 64, vocab_size=50_257)
    assert loader.n_tokens == 5 * 10**11
    for _ in range(1000):
        loader.get_batch()
    before = resident()
    for _ in range(10_000):
        loader.get_batch()
    assert resident() - before < 50 << 20
    starts = np.concatenate([loader.positions(loader.sample_numbers([step]))
                             for step in range(0, 11_000, 50)])
    assert starts.min() < 10**10 and starts.max() > 49 * 10**10


@needs_proc
def test_a_large_file_is_not_read_when_it_is_opened(tmp_path):
    path = sparse(tmp_path / "train.bin", 4 << 30)
    before = resident()
    DataLoader(path, 8, 256, vocab_size=50_257).get_batch()
    assert resident() - before < 50 << 20


# --- devices

def test_all_of_uint16_arrives(tmp_path):
    tokens = np.arange(2**16)
    write(tmp_path / "train.bin", tokens)
    x, y = DataLoader(tmp_path, 1, 2**16 - 1).get_batch()
    assert np.array_equal(x[0], tokens[:-1]) and np.array_equal(y[0], tokens[1:])


def test_each_device_gets_its_own_batch(folder):
    loader = DataLoader(folder, 4, 32)
    devices = ["cpu", "meta", torch.device("meta"), torch.device("cpu"), "cpu"]
    got = [loader.get_batch(device, step=5)[1] for device in devices]
    assert [y.device for y in got] == [torch.device(d) for d in devices]
    assert torch.equal(got[0], got[-1]) and torch.equal(got[0], got[-2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_batches_equal_cpu_batches(folder, monkeypatch):
    monkeypatch.setattr(dataloader, "CHUNK_TOKENS", 4 * 32 * 3)  # pinned blocks are used again soon
    cpu, cuda = DataLoader(folder, 4, 32), DataLoader(folder, 4, 32)
    busy, got = torch.randn(4000, 4000, device="cuda"), []
    for _ in range(300):
        busy = busy @ busy * 1e-4
        got.append(cuda.get_batch("cuda"))
    for x, y in got:
        assert all(map(torch.equal, (x.cpu(), y.cpu()), cpu.get_batch()))


# --- the order, as the file's docstring shows it

def test_the_order_is_that_of_the_worked_example():
    """Ten samples, batches of two, two ranks: the table is what the loader gives."""
    config = TrainConfig(batch_size=2, gradient_accumulation_steps=2, seed=1337)
    loaders = [RowLoader([np.arange(10)], config, Ranks(rank=r, world_size=2)) for r in range(2)]
    rows = re.findall(r"^    (\d) +(\d+) +(\d+) +(\d) (\d) +(\d+) +(\d+) +(\d) (\d)",
                      dataloader.__doc__, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        call, *numbers = map(int, row)
        first, second = (x.get_batch("cpu", call)[0].tolist() for x in loaders)
        wanted = [4 * call, 4 * call + 1, *first, 4 * call + 2, 4 * call + 3, *second]
        assert numbers == wanted


# --- batches ahead

class SlowRows(RowLoader):
    """A loader that takes 50 ms a batch and notes which thread asked."""

    def get_batch(self, device="cpu", step=0):
        self.threads = [*getattr(self, "threads", ()), threading.current_thread().name]
        time.sleep(0.05)
        return super().get_batch(device, step)


def test_a_thread_reads_ahead_the_same_batches():
    """Computing 60 ms a batch hides its 50 ms; a rewind in between."""
    loader = SlowRows([np.arange(100)], TrainConfig(batch_size=4), Ranks())
    batches, steps = Prefetcher(loader, torch.device("cpu")), [*range(8), *range(3, 8)]
    for step in steps:
        assert batches.get(step)[0].tolist() == loader.positions(
            loader.sample_numbers([step])).tolist()
        if step == 3:
            batches.seconds = 0.0
        time.sleep(0.06)
        if step == 7:
            assert batches.seconds < 0.1  # 5 batches without the thread: 0.25
    assert all(name.startswith("batches") for name in loader.threads)
    batches.close()
    assert not any(t.name.startswith("batches") for t in threading.enumerate())


def test_a_loader_that_computes_stays_on_the_main_thread():
    loader = SlowRows([np.arange(100)], TrainConfig(batch_size=4), Ranks())
    loader.computes = True
    batches = Prefetcher(loader, torch.device("cpu"))
    for step in range(4):
        batches.get(step)
    assert set(loader.threads) == {"MainThread"} and batches.seconds == 0.0


def test_what_a_thread_meets_is_raised_where_the_batch_is_asked_for():
    loader = SlowRows([np.arange(100)], TrainConfig(batch_size=4), Ranks())
    batches = Prefetcher(loader, torch.device("cpu"))
    loader.rows = lambda *_: (_ for _ in ()).throw(DataError("the disk is gone"))
    with pytest.raises(DataError, match="the disk is gone"):
        batches.get(1)
    batches.close()


def test_the_order_of_a_square_number_of_samples_stays_as_it_is():
    """The permutation's grid has exactly as many cells then; a resumed run needs this order."""
    assert dataloader.shuffled(np.arange(9), 9, 1337)[1].tolist() == [8, 7, 0, 2, 5, 1, 4, 3, 6]
