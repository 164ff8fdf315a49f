"""model/sample.py: from ckpt.pt alone to text, as a library and through the command line."""

import subprocess
import sys

import pytest
import torch
from conftest import REPO, TINY

from data.tokenizer import load_tokenizer
from model.gpt import GPT, GPTConfig
from model.sample import generate, load_model, main, pick
from train.config import load_config
from train.train import train


@pytest.fixture(scope="module")
def model():
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=100)).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 300)
    done = subprocess.run([sys.executable, "-m", "data.prepare", folder / "text.txt", "--out",
                           folder / "d"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train(load_config(None, TINY | dict(data_dir=str(folder / "d"), out_dir=str(folder / "o"),
                                        max_iters=60, eval_interval=60, block_size=32)))
    return folder / "o" / "ckpt.pt"


def sample(*args):
    return subprocess.run([sys.executable, "-m", "model.sample", *map(str, args)], cwd=REPO,
                          capture_output=True, text=True)


def greedy_without_cache(model, idx, n):
    for _ in range(n):
        idx = torch.cat((idx, model(idx)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


def test_cached_sampling_equals_the_full_forward(model):
    idx = torch.randint(0, 100, (3, 5), generator=torch.Generator().manual_seed(1))
    cached = generate(model, idx, 11, temperature=0)
    assert torch.equal(cached, greedy_without_cache(model, idx, 11))


def test_prompt_and_text_longer_than_the_context(model):
    idx = torch.randint(0, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    out = generate(model, idx, 50, temperature=0)
    assert out.shape == (1, 90) and torch.equal(out[:, :40], idx)
    assert torch.equal(out[:, 40], model(idx[:, -16:])[:, -1].argmax(-1))


def test_same_seed_same_text_other_seed_other_text(model):
    idx = torch.zeros(2, 1, dtype=torch.long)
    a, b, c = (generate(model, idx, 12, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert not torch.equal(a[0], a[1])  # rows draw for themselves


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(500, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(pick(logits, 1.0, 2, None, generator).tolist()) == {0, 1}
    assert set(pick(logits, 1.0, None, 0.7, generator).tolist()) == {0, 1}
    assert set(pick(logits, 1.0, None, 0.01, generator).tolist()) == {0}
    assert set(pick(logits, 1.0, None, 1.0, generator).tolist()) == {0, 1, 2, 3}
    assert set(pick(logits, 0, None, None, generator).tolist()) == {0}


def test_padded_ids_are_never_sampled(model):
    out = generate(model, torch.zeros(64, 1, dtype=torch.long), 15, temperature=50.0, seed=1)
    assert out.max() < 100


def test_stops_at_the_end_of_text(model):
    idx = torch.zeros(1, 1, dtype=torch.long)
    first = int(generate(model, idx, 1, temperature=0)[0, 1])
    assert generate(model, idx, 15, temperature=0, stop_token=first).shape == (1, 2)


def test_checkpoint_alone_is_enough(checkpoint):
    model, tokenizer = load_model(checkpoint, "cpu")
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox" and not model.training
    assert load_tokenizer("byte").n_vocab == tokenizer.n_vocab


def test_command_line_streams_the_prompt_and_a_continuation(checkpoint):
    done = sample("--ckpt", checkpoint, "--prompt", "the quick", "--max_new_tokens", 60,
                  "--temperature", 0)
    assert done.returncode == 0 and done.stdout.startswith("the quick b"), done.stderr
    assert "tokens/s" in done.stderr


def test_several_samples_at_once(checkpoint):
    done = sample("--ckpt", checkpoint, "--prompt", "the", "--num_samples", 3, "--top-k", 5,
                  "--seed", 3, "--max-new-tokens", 20)
    assert done.returncode == 0 and done.stdout.count("-" * 72) == 3


@pytest.mark.parametrize("args, message", [
    (["--ckpt", "nowhere.pt"], "no such file"), (["--temperature", "-1"], "at least 0"),
    (["--top_p", "0"], "(0, 1]"), (["--num_samples", "0"], "at least 1")])
def test_bad_input_is_one_message_and_exit_2(capsys, args, message):
    assert main(args) == 2
    assert message in capsys.readouterr().err
