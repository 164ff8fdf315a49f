"""python -m train.tools.check: the unedited repository passes for every model type, and each of the
silent faults that forks had made is found by the check that is for it."""

import functools
import json
import pathlib
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPO, TINY
from processes import python

from model import gpt
from train.base.errors import SetupError
from train.config import load_config
from train.dataloader import Data

SHAPE = ["--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--n_hidden", "64", "--block_size",
         "128"]
MODELS = {
    "gpt": (),
    "chat": ("--init_from", "base/ckpt.pt", "--data_dir", "chat"),
    "lora": ("--backbone", "chat_model/ckpt.pt", "--data_dir", "chat"),
    "dpo": ("--init_from", "chat_model/ckpt.pt", "--data_dir", "pairs"),
    "grpo": ("--init_from", "chat_model/ckpt.pt", "--data_dir", "prompts", "--group_size", "4",
             "--answer_tokens", "8"),
    "distill": ("--teacher", "base/ckpt.pt", *SHAPE),
    "moe": (*SHAPE, "--n_hidden", "96"),  # experts of 32: grouped products
    "memory": ("--backbone", "base/ckpt.pt", "--n_chapters", "4", "--chapter_size", "8",
               "--old_data_dir="),
    "autoencoder": ("--data_dir", "features", "--delays", "0"),
    "sae": ("--backbone", "base/ckpt.pt", "--d_sae", "512", "--k", "4", "--auxk", "8",
            "--buffer_size", "2048"),
    "classifier": ("--data_dir", "labels", *SHAPE)}


def command(*args, cwd=REPO):
    done = python(*args, cwd=cwd, merged=True, timeout=300)
    return done.returncode, done.stdout


def succeed(*args):
    code, output = command(*args)
    assert code == 0, output


def prepare_text(folder):
    """Prepare the data set `text` in a folder, and return the folder."""
    words = np.random.default_rng(0).choice(["the", "quick", "fox", "jumps.", "a\n"], 20_000)
    (folder / "words.txt").write_text(" ".join(words))
    succeed("-m", "data.prepare", folder / "words.txt", "--out", folder / "text", "--tokenizer",
            "byte")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and models for every model type."""
    folder = prepare_text(tmp_path_factory.mktemp("check"))
    run = ["run_train.py", "--device", "cpu", "--compile", "false", "--num_threads", "1",
           "--sample_tokens", "0", "--max_iters", "6", "--eval_interval", "6"]
    base = str(folder / "base" / "ckpt.pt")
    succeed(*run, "--config", "train/config_test.yaml", *SHAPE, "--data_dir", folder / "text",
            "--out_dir", folder / "base")
    few = ["--num_samples", "200"]
    succeed("-m", "data.prepare.chat", "example", "--out", folder / "chat", "--tokenizer", base,
            *few)
    succeed(*run, "--config", "train/configs/chat.yaml", "--init_from", base, "--data_dir",
            folder / "chat", "--out_dir", folder / "chat_model")
    chat_model = str(folder / "chat_model" / "ckpt.pt")
    succeed("-m", "data.prepare.pairs", "example", "--reference", chat_model, "--out",
            folder / "pairs", *few)
    succeed("-m", "data.prepare.prompts", "example", "--tokenizer", chat_model, "--out",
            folder / "prompts", *few)
    rows = [dict(text=f"{i} a {color} thing", label=color, evidence=color)
            for i in range(200) for color in ("red", "blue")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    succeed("-m", "data.prepare.labels", folder / "rows.jsonl", "--out", folder / "labels")
    succeed("-m", "data.prepare.features", "--synthetic", "--out", folder / "features")
    return folder


def check(folder, model, *args, cwd=REPO):
    """(exit code, {check: status}, output) of the command."""
    given = [str(folder / a) if (folder / a).exists() else a for a in (*MODELS[model], *args)]
    if (REPO / f"train/configs/{model}.yaml").exists():
        given += ["--config", f"train/configs/{model}.yaml"]
    if "--data_dir" not in given:
        given += ["--data_dir", str(folder / "text")]
    code, output = command("-m", "train.tools.check", "--model", model, *given, cwd=cwd)
    statuses = {line[16:].partition(":")[0]: line[:14].strip() for line in output.splitlines()
                if line.startswith(("ok ", "differs ", "not applicable "))}
    return code, statuses, output


def test_methods_of_distribution_are_those_of_their_names():
    """Whatever the configuration says."""
    from train.tools.check import CHECKS
    assert {name: CHECKS[name].keywords["distributed"] for name in ("ddp", "fsdp")} == dict(
        ddp="ddp", fsdp="fsdp")


def test_without_evaluations_nothing_is_killed_and_nothing_is_said_of_resume():
    from train.tools.check import check_resume
    case = SimpleNamespace(run=SimpleNamespace(data=Data(None)))
    with pytest.raises(SetupError, match="no validation data"):
        check_resume(case)


def test_a_crash_while_a_refusal_is_handled_is_a_crash(tmp_path, monkeypatch):
    from train.tools import check

    def crash(config, on_evaluation):
        try:
            raise SetupError("refused")
        except SetupError:
            return 1 / 0
    (tmp_path / "config.yaml").write_text("max_iters: 1\n")
    monkeypatch.setattr(check, "train", crash)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        check.train_in_process(SimpleNamespace(folder=tmp_path), "a")


def test_tokens_have_ends_of_text(tmp_path):
    from train.tools.check import Case
    case = Case(None, tmp_path)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=256, block_size=128))
    case.run = SimpleNamespace(raw_model=model, data=Data(None, None, dict(eot_token=255)))
    for rows in (1, 2):
        ends = (case.tokens(rows) == 255).sum(1)
        assert (ends >= 1).all() and (ends <= 6).all()
    assert torch.equal(case.tokens(2), case.tokens(2))


class Clock(torch.nn.Module):
    """A submodule whose before_step() sets what the forward pass needs."""
    it = None

    def before_step(self, it):
        self.it = it


class Annealed(gpt.GPT):
    def __init__(self, *args):
        super().__init__(*args)
        self.clock = Clock()

    def trunk(self, *args, **kwargs):
        return super().trunk(*args, **kwargs) * (1 + 0.1 * self.clock.it)


def test_before_step_is_called_as_in_a_run(data_dir, monkeypatch, capfd):
    from train.tools.check import SETTINGS, CheckOptions
    from train.tools.check import check as run_checks
    monkeypatch.setattr(gpt, "build_model", functools.partial(gpt.build_model, kind=Annealed))
    config = load_config(None, TINY | SETTINGS | dict(
        data_dir=str(data_dir), eval_on_start=False, early_stopping_metric="val_loss"))
    names = ["decoding", "weights", "gradients", "loss", "evaluation", "flops"]
    failed = run_checks(CheckOptions(only=names), config)
    assert not failed and capfd.readouterr().out.count("ok  ") == len(names)


def test_choices_are_repeated_in_the_dimension_in_which_they_were_made():
    from train.tools.check import FixedChoices
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    with FixedChoices() as fixed:
        for y in (x, -x):  # whose own choices are others
            fixed.n_used = 0
            chosen = (torch.topk(y, 2, 1), y.topk(2, dim=0, largest=False),
                      torch.topk(input=y, k=2), y.topk(2, -2, sorted=False))
    for dim, (values, index) in zip((1, 0, 2, 1), chosen):
        assert torch.equal(values, (-x).gather(dim, index))
    assert torch.equal(chosen[0].indices, x.topk(2, dim=1).indices)
    with FixedChoices(), torch.no_grad(), pytest.raises(SetupError, match="threshold"):
        x.topk(2)


@pytest.mark.ci
@pytest.mark.parametrize("model", MODELS)
def test_the_unedited_repository_passes(model, folder):
    """All checks of a GPT, and the quick ones of the other model types (all with -m slow)."""
    quick = ["gradients", "loss", "evaluation", "decoding", "flops"]
    only = [] if model == "gpt" else [a for name in quick for a in ("--only", name)]
    code, statuses, output = check(folder, model, *only)
    assert code == 0 and "differs" not in statuses.values(), output
    assert set(quick) <= statuses.keys()
    assert len(statuses) == 13 or model != "gpt"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_unedited_repository_passes_all_checks(model, folder):
    code, statuses, output = check(folder, model)
    assert code == 0 and len(statuses) == 13, output


BIAS = "model/core/ops.py", "    if T == 1 and not dropout:\n"
COLUMNS = "    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)\n"
SCORES = ("    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))\n"
          "    mask = (i >= j) if mask is None else mask\n"
          "    scores = (q @ k.mT * q.size(-1) ** -0.5 + bias).masked_fill(~mask, -math.inf)\n"
          "    return scores.softmax(-1).to(v.dtype) @ v\n" + BIAS[1])
# name: (file, text, edited text, check that differs, arguments)
FAULTS = {
    "a window that decoding does not have": (
        "model/gpt.py", "if self.window:", "if self.window and cache is None:", "decoding",
        ("--layer_types", "FW", "--window", "8")),
    "a softcap of attention scores that one token and bfloat16 do not have": (
        "model/core/ops.py", "return F.scaled_dot_product_attention(q, k, v, mask, dropout",
        "return F.scaled_dot_product_attention(q / (1 + q.square()).sqrt(), k, v, mask, dropout",
        "decoding", ()),
    "other attention scores in bfloat16": (
        "model/core/ops.py", "(q * D ** -0.5, k, v))", "(q * D ** -0.25, k, v))",
        "decoding", ()),
    "a bias by columns, of which each text has others in a row (ALiBi)": (
        *BIAS, COLUMNS + "    bias = 0.5 * (j - i)\n" + SCORES, "decoding", ()),
    "a bias by columns that counts from the longest row (T5)": (
        *BIAS, COLUMNS + "    bias = -(i - j).clamp(min=0).log1p()\n" + SCORES, "decoding",
        ("--layer_types", "W", "--window", "64")),  # without --compile, which would find it
    "single tokens that are stored elsewhere with --compile": (
        "model/sample/compiled.py", "slots[:, None] == self.slot", "slots[:, None] > self.slot",
        "decoding", ()),
    "an export of other weights": (
        "model/convert/tensors.py", 'MLP = {f"mlp.{n}"',
        'MLP = {f"mlp.{dict(up=\'gate\', gate=\'up\').get(n, n)}"', "export", ()),
    "tables that count as products": (
        "model/gpt.py", "if isinstance(m, nn.Embedding)}", "if m is None}", "flops",
        ("--prev_embedding", "true")),
    "a key without effect": (
        "train/base/keys.py", "    qk_norm: bool",
        "    unused: int = key(2, '')\n    qk_norm: bool", "keys", ()),
    "a gradient that is wrong": (
        "model/core/ops.py", "torch.addcmul(g, n, along, value=-1)", "(g + 0)", "gradients", ()),
    "a cap that the loss does not have": (
        "model/gpt.py", "return ops.finish_logits(z.float())[..., :self.config.vocab_size]",
        "return 30 * torch.tanh(z[..., :self.config.vocab_size] / 30)", "loss", ()),
    "a cap without its derivative": (
        "model/core/ops.py", "if logits is not z:  # d loss / d z", "if False:", "loss", ()),
    "another loss if it is compiled for a GPU": (
        "model/core/ops.py", "return F.cross_entropy(z.", "return 1.01 * F.cross_entropy(z.",
        "loss", ()),
    "a loss that only training has, and not each of its forms": (
        "model/core/ops.py", "        losses = cross_entropy(h,",
        "        losses = (1.01 if self.training else 1) * cross_entropy(h,", "loss", ()),
    "a parameter that is not used": (
        "model/gpt.py", "        self.wte = Embedding(c.padded_vocab_size, c.n_embd)",
        "        self.wte = Embedding(c.padded_vocab_size, c.n_embd)\n"
        "        self.unused = nn.Parameter(torch.zeros(3))", "gradients", ()),
    "a part that is zero at first and that decoding does not have": (
        "model/gpt.py", "        x = (y if self.norms_input else x) + self.attn(y, *context)",
        "        x = (y if self.norms_input else x) + self.attn(y, *context)\n"
        "        x = x + self.shift * (x if context[1] else x.roll(1, 1).tril(-1))", "decoding",
        ("--learning_rate", "1e-4")),
    "an optimizer with other weights for evaluation": (
        "train/setup.py", "        self.raw_model.eval()\n        try:",
        "        self.raw_model.eval()\n        for p in self.raw_model.parameters():\n"
        "            p.data.mul_(2)\n        try:", "weights", ()),
    "dropout in evaluations": (
        "model/gpt.py", "ops.apply_dropout(y, c.dropout, self.training)",
        "ops.apply_dropout(y, c.dropout, True)", "evaluation", ()),
    "initial values of another kind": (
        "model/gpt.py", "self.filled = fill(self, seed)",
        "self.filled = fill(self, seed); self.wte.weight.data.mul_(2)", "fsdp", ()),
    "batches that depend on earlier ones": (
        "train/dataloader.py", "        return loader(",
        "        class Changing(DataLoader):\n"
        "            def get_batch(self, device='cpu', step=None):\n"
        "                self.n = getattr(self, 'n', 0) + 1\n"
        "                return super().get_batch(device, (step or 0) + self.n)\n"
        "        return Changing(", "resume", ()),
    "state outside the state_dict": (
        "model/gpt.py", "    def trunk(self",
        "    def after_step(self, it, sums):\n        self.n = 1 - getattr(self, 'n', 0)\n\n"
        "    def trunk(self", "resume", ()),
    "random numbers in the update": (
        "train/train.py", "    norm = torch.nn.utils.get_total_norm(grads)\n",
        "    norm = torch.nn.utils.get_total_norm(grads)\n"
        "    for g in grads:\n        g.add_(torch.randn_like(g), alpha=1e-9)\n", "ddp", ()),
    "random numbers in the forward pass": (
        "model/gpt.py", "        x = self.wte(idx)  #",
        "        x = self.wte(idx + (torch.rand(idx.shape) < 0.2).long())  #", "ddp", ()),
    "blocks that each rank skips at random": (
        "model/gpt.py", "            x = block(x, ropes, cache, mask)\n",
        "            if torch.rand(()) > 0.4:\n                x = block(x, ropes, cache, mask)\n",
        "fsdp", ()),
    "a state that recomputed blocks change twice": (
        "model/gpt.py", "        y = self.ln_1(x)\n",
        "        y = self.ln_1(x) * (1 + 0.01 * self.seen)\n"
        "        self.seen += self.training\n", "recompute", ()),
    "masked targets without a count": (
        "model/gpt.py", "sums = dict(count=n)", "sums = {}",
        "split", ()),
    "initial values of a subclass that only FSDP has": (
        "model/gpt.py", "    fill(model, config.seed, model.filled)", "    pass  #", "fsdp", ()),
    "an optimizer that is not resumed": (
        "train/checkpoint.py", '\n    fill(own, state, ranks, shards, "optimizer.state.")', "",
        "resume", ())}
FORMS = {  # whose logits differ
    "a bias by columns, of which each text has others in a row (ALiBi)": "rows of GRPO",
    "a bias by columns that counts from the longest row (T5)": "ragged rows"}
# Edits that are needed besides, for the fault to have an effect.
BESIDES = {
    "blocks that each rank skips at random": [(
        "train/tools/check.py", "dist_timeout=60)", "dist_timeout=2)")],
    "an optimizer with other weights for evaluation": [(
        "train/setup.py", "            self.raw_model.train()\n            if",
        "            self.raw_model.train()\n            for p in self.raw_model.parameters():\n"
        "                p.data.div_(2)\n            if")],
    "a part that is zero at first and that decoding does not have": [(
        "model/gpt.py", '        self.gradient_checkpointing = "false"\n',
        '        self.gradient_checkpointing = "false"\n'
        "        self.shift = nn.Parameter(torch.zeros(()))\n")],
    "a cap without its derivative": [(
        "model/core/ops.py", "    return z\n", "    return 30 * torch.tanh(z / 30)\n")],
    "a state that recomputed blocks change twice": [(
        "model/gpt.py", '        self.gradient_checkpointing = "false"\n',
        '        self.gradient_checkpointing = "false"\n'
        '        self.register_buffer("seen", torch.zeros(1))\n')],
    "state outside the state_dict": [(
        "model/gpt.py", "        return loss, sums\n",
        "        return loss * (1 + getattr(self, 'n', 0)), sums\n")],
    "masked targets without a count": [(
        "model/gpt.py", "        return self.score(self.trunk(idx), targets)\n",
        "        masked = targets.cumsum(1) % 7 > targets[:, :1] % 5\n"
        "        return self.score(self.trunk(idx), targets.masked_fill(masked, -1))\n")],
    "initial values of a subclass that only FSDP has": [(
        "model/gpt.py", "        self.filled = fill(self, seed)  # by initial(); build_model fills",
        "        self.filled = fill(self, seed)\n"
        "        self.lm_head = nn.Linear(c.n_embd, c.padded_vocab_size, bias=False)\n"
        "        # by initial(); build_model fills")]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the repository for edits."""
    copy = tmp_path_factory.mktemp("copy")
    files = subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).split("\n")
    for name in filter(None, files):
        if not name.startswith("tests/") and (REPO / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, copy / name)
    return copy


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS)
def test_a_silent_fault_of_a_fork_is_found(fault, folder, repository):
    file, text, edited, name, args = FAULTS[fault]
    changes = [(file, text, edited), *BESIDES.get(fault, ())]
    originals = {f: (repository / f).read_text() for f, _, _ in changes}
    try:
        for path, old, new in changes:
            file = pathlib.Path(repository / path)
            assert file.read_text().count(old) == 1, old
            file.write_text(file.read_text().replace(old, new))
        code, statuses, output = check(folder, "gpt", "--only", name, *args, cwd=repository)
        assert code == 1 and statuses == {name: "differs"}, output
        assert FORMS.get(fault, "") in output
        if fault == "a parameter that is not used":  # a refusal is shown from its beginning
            _, statuses, output = check(folder, "gpt", "--only", "fsdp", cwd=repository)
            assert statuses == {"fsdp": "not applicable"} and "under FSDP, initial(name" in output
    finally:
        for path, original in originals.items():
            (repository / path).write_text(original)
