"""Mixtures of data sets (train/options/mixture.py): which source a sample is of, what each source
then gives, the same at any world size; validation by source; what cannot be mixed."""

import json
import math
import os
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import TINY
from runs import SMALL, Program, assert_same, configure, go, metrics, on_two_ranks, run_program

from data.prepare import chat as data_chat
from model.chat import ChatGPT
from model.gpt import GPT, GPTConfig
from model.sample import load_model
from train.base.errors import CheckpointError, ConfigError, DataError, SetupError
from train.base.fields import parse_mixture
from train.config import load_config, to_yaml
from train.dataloader import Data, DataLoader, RowLoader
from train.distributed import Ranks
from train.options import mixture
from train.options.mixture import Mixture, interleave, samples_per_period
from train.setup import open_data
from train.train import train


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three folders of learnable tokens, each of its own: 0 to 79, 80 to 159 and 160 to 239."""
    top, draw = tmp_path_factory.mktemp("mix"), np.random.default_rng(0)
    for i, (name, n) in enumerate(dict(code=3000, math=1500, web=9000).items()):
        (top / name).mkdir()
        for split, size in (("train", n), ("val", n // 4)):
            tokens = 80 * i + np.cumsum(draw.integers(0, 3, size)) % 80
            tokens.astype("<u2").tofile(top / name / f"{split}.bin")
    return top


def mixed(folders, **weights):
    return ",".join(f"{folders / name}:{weight}" for name, weight in weights.items())


def loaders(folders, names=("code", "web"), split="train", batch=4, **kwargs):
    return {name: DataLoader(folders / name, batch, 8, split, 3, vocab_size=256, **kwargs)
            for name in names}


# -----------------------------------------------------------------------------
# which source

@pytest.mark.parametrize("weights, counts", [
    ([0.3, 0.7], [3, 7]), ([1, 1, 1], [1, 1, 1]), ([0.1, 0.2, 0.7], [1, 2, 7]), ([6, 2], [3, 1]),
    ([0.5, 0.3, 0.15, 0.05], [10, 6, 3, 1]), ([1, 1e9], [0, 10_000]),
    ([0.33333, 0.66667], [3333, 6667])])
def test_shares_are_exact_or_rounded_to_a_10_000th(weights, counts):
    assert samples_per_period(weights) == counts


def test_rounded_shares_are_the_nearest_and_add_up():
    draw = np.random.default_rng(1)
    for k in range(2, 12):
        weights = draw.random(k) + 0.01
        counts = samples_per_period(weights)
        assert sum(counts) == 10_000
        assert np.abs(np.array(counts) / 10_000 - weights / weights.sum()).max() < 1e-4


def chairmen(counts):
    """The paper's rule as it is written, in fractions."""
    k, had = len(counts), [0] * len(counts)
    slack, share = Fraction(1, 2 * k - 2), [Fraction(c, sum(counts)) for c in counts]
    for n in range(1, sum(counts) + 1):
        due = [i for i in range(k) if share[i] * n - had[i] >= slack]
        first = min(due, key=lambda i: ((1 - slack - (share[i] * n - had[i])) / share[i], i))
        had[first] += 1
        yield first


@pytest.mark.parametrize("counts", [[3, 7], [1, 1, 1], [10, 6, 3, 1], [1, 999], [1] * 9 + [91],
                                    [13, 29, 31, 37, 41, 53], [333, 667]])
def test_every_source_has_its_share_of_every_beginning(counts):
    """Within one sample, and less: 1 - 1 / (2 k - 2); so within twice that of any stretch, for two
    sources within one."""
    table, period, k = interleave(counts), sum(counts), len(counts)
    assert table == list(chairmen(counts))
    assert np.bincount(table).tolist() == counts
    had = np.eye(k, dtype=np.int64)[table].cumsum(0)  # (period, k) after each place
    off = had * period - np.arange(1, period + 1)[:, None] * np.array(counts)  # in 1 / period
    assert np.abs(off).max() * (2 * k - 2) <= (2 * k - 3) * period
    off = np.concatenate((np.zeros((1, k)), off))  # a stretch is the difference of two beginnings
    most = (off.max(0) - off.min(0)).max() / period
    assert most <= 1 if k == 2 else most < 2


def test_the_order_never_changes_and_is_that_of_the_worked_example():
    """The order is frozen: a change here changes every run that is resumed."""
    rows = re.findall(r"^    (?:g|source|its sample) +(.*)$", mixture.__doc__, re.MULTILINE)
    g, names, numbers = (row.split() for row in rows)
    two = {name: Rows(name) for name in ("code", "web")}
    whole = Mixture(two, [3, 7])
    found = whole.read(np.arange(len(g)))[0]
    assert [f"{n}{i}" for n, i in zip(names, numbers)] == [str(x) for x in found]
    assert interleave([2, 3, 5]) == [2, 1, 2, 0, 2, 1, 2, 0, 1, 2]


class Rows:
    """A source whose sample i is the text NAMEi."""
    samples, unit, units_per_sample, calls_per_chunk, val_batch_size = 5, "row", 1, 1, 2
    batch_size, seed, rank, world_size = 2, 0, 0, 1

    def __init__(self, name):
        self.name = name

    def read(self, g):
        return [np.array([f"{self.name}{i}" for i in g], "<U9")]

    def tensors(self, arrays, device):
        return arrays


# -----------------------------------------------------------------------------
# which samples

@pytest.mark.parametrize("names, counts", [(("code", "web"), [3, 7]),
                                           (("code", "math", "web"), [1, 2, 2])])
@pytest.mark.parametrize("world", [1, 4])
def test_a_batch_is_the_next_samples_of_each_source(folders, names, counts, world, monkeypatch):
    """Against the sources' own loaders, one sample at a time, over some epochs; by steps that come
    in order and by any."""
    monkeypatch.setattr("train.dataloader.CHUNK_TOKENS", 7 * 4 * 8)
    n, alone = 800, loaders(folders, names, batch=1)
    table, had, wanted = interleave(counts), dict.fromkeys(names, 0), []
    for g in range(4 * n):
        name = names[table[g % len(table)]]
        wanted.append(alone[name].get_batch(step=had[name]))
        had[name] += 1
        share = counts[names.index(name)] / sum(counts)
        assert abs(had[name] - share * (g + 1)) < 1
    assert had["code"] > 1.2 * alone["code"].samples  # into another epoch
    ranks = [Mixture(loaders(folders, names, rank=r, world_size=world), counts)
             for r in range(world)]
    steps = [*range(40), *np.random.default_rng(0).permutation(n // world)[:40].tolist()]
    for step in steps:
        for r, rank in enumerate(ranks):
            x, y = rank.get_batch(step=step)
            assert x.shape == y.shape == (4, 8) and x.dtype == torch.int64
            first = 4 * (step * world + r)
            for i in range(4):
                assert torch.equal(x[i], wanted[first + i][0][0])
                assert torch.equal(y[i], wanted[first + i][1][0])


def test_far_into_a_run_no_number_is_lost(folders):
    whole = Mixture(loaders(folders), [3, 7])
    g = 10**15 + np.arange(10)
    found = {name: own for name, _, _, own in whole.by_source(g)}
    assert found["code"].tolist() == [3 * 10**14 + i for i in range(3)]
    assert found["web"].tolist() == [7 * 10**14 + i for i in range(7)]


def test_a_message_names_the_source_of_a_batch(folders):
    two = loaders(folders)
    whole = Mixture(two, [3, 7])
    assert whole.locate(0) == (
        f"code: windows at tokens {two['code'].positions(np.array([0]))[0]}; "
        "web: windows at tokens " + ", ".join(map(str, two["web"].positions(np.arange(3)))))


def test_sources_of_two_types_of_files(folders, tmp_path):
    """uint16 beside int64 of .npy shards."""
    tokens = np.fromfile(folders / "web/train.bin", "<u2")
    np.save(tmp_path / "train_0.npy", tokens.astype("<i8"))
    plain = loaders(folders)
    other = plain | dict(web=DataLoader(tmp_path, 4, 8, seed=3, vocab_size=256))
    a, b = Mixture(plain, [1, 1]), Mixture(other, [1, 1])
    assert all(map(torch.equal, a.get_batch(step=5), b.get_batch(step=5)))


# -----------------------------------------------------------------------------
# the key

@pytest.mark.parametrize("given", [
    ["--data_dir", "a/web:0.7,b/code:0.3"], ["data_dir=a/web:.7, b/code:3e-1"]])
def test_forms_of_the_key(given, tmp_path):
    config = load_config(None, given)
    assert parse_mixture(config.data_dir) == {"a/web": 0.7, "b/code": 0.3}
    (tmp_path / "a.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "a.yaml").data_dir == config.data_dir


def test_folders_of_old_stay_folders():
    for name in ("data/bin/a", "x/{split}_*.bin", "a,b", "C:/data", "C:/a,b", "a:1", "{split}",
                 "data/bin/Report, 2024"):
        assert load_config(None, [f"--data_dir={name}"]).data_dir == name
    home = os.path.expanduser("~")
    config = load_config(None, ["--data_dir=~/a:1,~/b:2"])
    assert parse_mixture(config.data_dir) == {f"{home}/a": 1, f"{home}/b": 2}


@pytest.mark.parametrize("value", [
    "a:1,b:-1", "a:1,b:0", "a:1,b", "a:1,a:2", "a:1,:2", "a:1,b:nan", "", " "])
def test_a_bad_mixture_is_refused_with_an_example(value):
    with pytest.raises(ConfigError, match="data_dir: expected .* a mixture of different "
                       "folders, weights above 0: a:7,b:3, got"):
        load_config(None, [f"--data_dir={value}"])


# -----------------------------------------------------------------------------
# runs

def test_validation_by_source_and_of_all(folders, tmp_path):
    """Each source's loss is recomputed from the checkpoint on its own windows, that of the mixture
    by the shares, which are not those of the validation data."""
    last = go(mixed(folders, web=0.7, code=0.3), tmp_path, eval_iters=5)
    model, _ = load_model(tmp_path / "ckpt.pt")
    losses = {}
    for name in ("web", "code"):
        tokens = np.fromfile(folders / name / "val.bin", "<u2").astype(np.int64)
        n = (len(tokens) - 1) // 8
        starts = [i * n // 10 * 8 for i in range(10)]  # 5 batches of 2, spread over the stream
        rows = torch.from_numpy(np.stack([tokens[s:s + 9] for s in starts]))
        logits = model(rows[:, :-1]).detach().double()  # (B, T, V)
        p = torch.log_softmax(logits, -1).gather(-1, rows[:, 1:, None])
        losses[name] = -p.mean().item()
    found = last["history"][-1]
    assert found["val_loss_web"] == pytest.approx(losses["web"], rel=1e-6)
    assert found["val_loss_code"] == pytest.approx(losses["code"], rel=1e-6)
    expected = 0.7 * losses["web"] + 0.3 * losses["code"]
    assert found["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["val_ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
    assert "val_loss_web" in metrics(tmp_path)[0]


def test_the_batches_of_an_evaluation_are_listed_once(folders, monkeypatch):
    """Not for each batch: the time would be quadratic."""
    config = configure(mixed(folders, web=0.7, code=0.3), "out")
    val = open_data(config, Ranks()).val
    calls = []
    for loader in val.loaders.values():
        monkeypatch.setattr(loader, "n_fixed", lambda n, f=loader.n_fixed: calls.append(n) or f(n))
    n = val.n_fixed(6)
    for i in range(n):
        val.source_of(i, 6)
        val.fixed_batch(i, 6)
    assert n == 12 and len(calls) == 2 + n  # of the list, and of the loader of each batch


def test_a_source_is_evaluated_as_it_is_alone(folders, tmp_path):
    """So numbers of mixtures with other weights compare."""
    go(mixed(folders, web=1, code=1, math=2), tmp_path / "out", max_iters=4)
    last = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])
    for name in ("web", "code", "math"):
        alone = go(folders / name, tmp_path / name, init_from=str(tmp_path / "out/ckpt.pt"),
                   eval_only=True)
        assert alone["val_loss"] == last[f"val_loss_{name}"]


@pytest.mark.matrix(120)
def test_killed_and_resumed(folders, tmp_path):
    """A run on a mixture is killed -> it goes on bit for bit; the weights may be written in another
    way, the folders elsewhere."""
    go(mixed(folders, web=0.6, code=0.4), tmp_path / "a")
    killed = Program(f"{folders}/web:0.6,{folders}/code:0.4", tmp_path / "b", save_interval=2)
    killed.wait_for("iter 9:")
    killed.kill()
    (tmp_path / "code").symlink_to(folders / "code")
    go(f"{tmp_path}/code:2,{folders}/web:3", tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")


def test_more_evaluations_than_the_sources_have_change_nothing(folders, tmp_path, capsys):
    data = mixed(folders, web=0.7, code=0.3)
    samples = [loader.val_samples for loader in loaders(folders, split="val").values()]
    go(data, tmp_path, max_iters=4, eval_iters=max(samples) // SMALL["batch_size"] + 1)
    go(data, tmp_path, max_iters=8, eval_iters=sum(samples))
    assert "Changed:" not in capsys.readouterr().out


def test_other_weights_are_refused_with_the_difference(folders, tmp_path):
    go(mixed(folders, web=0.7, code=0.3), tmp_path, max_iters=4)
    with pytest.raises(CheckpointError, match="- mixture: checkpoint has .code:0.3,web:0.7., now "
                                              ".code:0.4,web:0.6.\n.*--allow_change mixture"):
        go(mixed(folders, web=0.6, code=0.4), tmp_path, max_iters=8)
    with pytest.raises(CheckpointError, match=r"- data: .*\n.*- mixture: .*, now None"):
        go(folders / "web", tmp_path, max_iters=8)
    go(mixed(folders, web=0.6, code=0.4), tmp_path, max_iters=8,
       allow_change=["mixture"])


def test_two_ranks_equal_one(folders, tmp_path):
    changes = TINY | dict(data_dir=mixed(folders, web=0.6, code=0.3, math=0.1), vocab_size=256)
    one = train(load_config(None, changes | dict(out_dir=str(tmp_path / "one"))))
    two = on_two_ranks(tmp_path / "two", changes)
    for a, b in zip(one["history"], two, strict=True):
        for name in ("loss", "loss_web", "loss_code", "loss_math", "ppl"):
            assert a[f"val_{name}"] == pytest.approx(b[f"val_{name}"], rel=1e-5)


def test_a_source_decides_when_to_stop(folders, tmp_path):
    last = go(mixed(folders, web=0.7, code=0.3), tmp_path, eval_interval=2, ema=0.5,
              early_stopping_metric="val_loss_code", early_stopping_patience=1,
              early_stopping_min_delta=9.0)
    assert "no better val_loss_code" in last["finished"]
    assert last["history"][-1]["val_loss_code_ema"] > 0
    with pytest.raises(ValueError, match="have no 'val_loss_cod'; .*val_loss_code, "):
        go(mixed(folders, web=0.7, code=0.3), tmp_path / "b",
           early_stopping_metric="val_loss_cod")


@pytest.mark.parametrize("extra", [[], ["--dry_run"]])
def test_passes_over_each_source_are_said(folders, tmp_path, extra):
    """20 steps of 4 samples: 56 of web's 1,123, 24 of code's 373."""
    code, text = run_program(f"{folders}/web:0.7,{folders}/code:0.3", tmp_path / "out", *extra)
    assert code == 0, text
    assert "Length: 12,000 tokens" in text and "epochs of 1,496 samples" in text
    assert ("  code: 30% of the samples, 0.06 epochs of 373\n"
            "  web: 70% of the samples, 0.05 epochs of 1,123") in text
    assert (tmp_path / "out").exists() != bool(extra)


def test_chats_mix_too(tmp_path):
    """Rows of arrays: each source's own rows come, filled up to one length, and are answered."""
    for word, size in (("moo", "64"), ("boo", "48")):
        with open(tmp_path / f"{word}.jsonl", "w") as f:
            f.writelines(json.dumps(dict(prompt=f"{i}?", response=word)) + "\n" for i in range(99))
        assert data_chat.main([f"{tmp_path}/{word}.jsonl", "--out", f"{tmp_path}/{word}",
                               "--block_size", size, "--tokenizer", "byte"]) == 0
    config = load_config(None, TINY | dict(
        model="chat", data_dir=f"{tmp_path}/moo:3,{tmp_path}/boo:1", block_size=64,
        out_dir=str(tmp_path / "out"), sample_tokens=4))
    data = open_data(config, Ranks())
    assert isinstance(data.train.loaders["moo"], RowLoader) and data.spec["mixture"] == \
        "boo:0.25,moo:0.75"
    tokens = torch.cat([data.train.get_batch("cpu", step)[0] for step in range(5)])
    said = [bytes(row[row < 256].tolist()) for row in tokens]
    assert sum(b"moo" in text for text in said) == 15 and sum(b"boo" in text for text in said) == 5
    last = train(config)["history"][-1]
    assert last["val_loss"] == pytest.approx(0.75 * last["val_loss_moo"]
                                             + 0.25 * last["val_loss_boo"])
    assert "### Assistant:" in (tmp_path / "out/samples.txt").read_text()


def test_the_width_of_a_batch_does_not_depend_on_where_a_run_resumes():
    """Batches that are read at once, here two, may be of the source with shorter rows only: another
    width would be another dropout mask than in an uninterrupted run."""
    config = load_config(None, dict(batch_size=1))

    def from_step(first):
        rows = [RowLoader([np.ones((20, width), np.uint16)], config, Ranks()) for width in (4, 9)]
        whole = Mixture(dict(zip("ab", rows)), [3, 1])
        return [whole.get_batch("cpu", step)[0].tolist() for step in range(first, 20)]
    assert from_step(3) == from_step(0)[3:]


def test_the_share_of_exact_answers_is_the_mean_of_the_sources(folders, tmp_path):
    """However long the answers of a source are: of one token and right, or of 40 and wrong."""
    loader = open_data(configure(mixed(folders, web=3, code=1), tmp_path), Ranks()).val
    sums = dict(web=dict(loss=1.0, count=20, bytes=20, accuracy=20, answers=20, exact=20),
                code=dict(loss=400.0, count=400, bytes=400, accuracy=100, answers=10, exact=2))
    sums = {name: {k: torch.tensor(float(v)) for k, v in own.items()} for name, own in sums.items()}
    model = ChatGPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=9))
    found = model.numbers(loader.merge(sums))
    assert found["exact"] == pytest.approx(0.75 * 1.0 + 0.25 * 0.2)
    assert found["accuracy"] == pytest.approx(0.75 * 1.0 + 0.25 * 0.25)


# -----------------------------------------------------------------------------
# what cannot be mixed

def test_samples_of_other_shapes_are_refused(tmp_path):
    """Of a model file whose Data.spec does not have the shape."""
    config = configure(tmp_path, tmp_path)
    a, b = (Data(RowLoader([np.ones((20, n), np.float32)], config, Ranks()), None, {})
            for n in (3, 4))
    mixture.check_compatible("a", a, "b", a)
    with pytest.raises(DataError, match=r"a and b cannot be mixed: sample is \[\(3,\)\] and"):
        mixture.check_compatible("a", a, "b", b)


def test_a_missing_folder_ends_in_one_line(folders, tmp_path):
    code, text = run_program(f"{folders}/web:0.7,nowhere:0.3", tmp_path / "out")
    assert code == 2 and text.count("\n") == 1
    assert text.startswith("nowhere: no such file or folder; set data_dir")


@pytest.mark.parametrize("changes, message", [
    (dict(web=1, other=1), "other and .*web cannot be mixed: tokenizer is {'kind': 'byte'} "
     "and None; prepare both in the same way, one of them with --tokenizer and the folder of the "
     "other"),
    ({"web": 1, "sub/web": 1}, "the last part of a folder, e.g. val_loss_web: expected"),
    ({"web": 1, "code/../web": 1}, "the last part of a folder, e.g. val_loss_web: expected"),
    (dict(web=1, code=1e-9), "less than 1 / 10,000 of all; remove that folder"),
])
def test_what_does_not_belong_together_is_refused(folders, tmp_path, changes, message):
    for name in ("web", "code"):
        (tmp_path / name).symlink_to(folders / name)
    for name, meta in (("sub/web", {}), ("other", dict(
            tokenizer=dict(kind="byte"), vocab_size=257))):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "meta.json").write_text(json.dumps(meta))
        for split in ("train", "val"):
            (tmp_path / name / f"{split}.bin").symlink_to(folders / f"web/{split}.bin")
    config = configure(mixed(tmp_path, **changes), tmp_path / "out", vocab_size=300)
    with pytest.raises(DataError, match=message):
        open_data(config, Ranks())
    assert not (tmp_path / "out").exists()


def test_a_source_with_the_name_of_a_number_is_refused_at_the_start(folders, tmp_path,
                                                                    monkeypatch):
    monkeypatch.setattr(GPT, "numbers", lambda self, sums: dict(loss_web=0.0))
    with pytest.raises(SetupError, match="already have loss_web; rename the file or folder"):
        go(mixed(folders, web=1, code=1), tmp_path, eval_on_start=False)
    assert not (tmp_path / "train.log").exists()


def test_a_model_that_reads_activations_takes_no_mixture(folders, tmp_path):
    go(folders / "web", tmp_path / "gpt", max_iters=0)
    config = load_config(None, SMALL | dict(
        model="sae", backbone=str(tmp_path / "gpt/ckpt.pt"), layer=0, vocab_size=None,
        data_dir=mixed(folders, web=1, code=1), out_dir=str(tmp_path / "out")))
    with pytest.raises(DataError, match="this model type does not support mixtures"):
        open_data(config, Ranks())
