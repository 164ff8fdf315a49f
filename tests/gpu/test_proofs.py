"""What a GPU would do with our code, without one: what Inductor writes for it, hidden waits,
graphs, and what crosses between ranks. proofs.py finds the numbers, in processes of their own."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))
import fake_cuda  # noqa: E402

from tests.gpu.forecast import TOKENS, forecast, of_layers  # noqa: E402

if why := fake_cuda.missing():
    pytest.skip(f"CUDA code without a GPU: {why}", allow_module_level=True)


# Of a step of so many layers: launches of Triton's kernels and of libraries', GB moved, GB saved
# for the backward pass, TFLOP. A number may exceed its row by 1%: more is a step back, less a new
# row.
LAYERS = {"gpt2": 2, "production": 2, "experts": 1, "chat": 1, "lora": 1}
STEPS = {
    "gpt2": (42, 31, 26.57, 5.12, 11.1),
    "production": (58, 37, 6.069, 0.848, 0.881),
    "experts": (59, 25, 5.531, 0.742, 0.656),
    "chat": (39, 20, 5.142, 0.704, 0.733),
    "lora": (57, 46, 21.32, 4.19, 6.25)}
# Of 12 layers, from those of 1 and 2: each adds the same.
TWELVE = (191, 171, 79.26, 13.34, 28.63)  # gpt2
FORECAST = 455e3  # tokens/s on an H100, at the least
NUMBERS = dict(triton=1, library=1, bytes=1e9, saved=1e9, flops=1e12)
LARGEST = 50304 * 768  # elements of the largest float32 buffer that there should be: a gradient

# Asked always, in one process; those of the slow tests have a process each.
QUESTIONS = ["train_crossings", "decode_crossings", "a_crossing", "attention_kernels", "one_token",
             "whole"]


def ask(folder, gpu, questions, answer):
    """Have proofs.py answer(question, its answer, the error where it has none) one after the other;
    the process."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", HERE / "proofs.py", folder, gpu, *questions], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {
            "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / gpu),
            "TRITON_CACHE_DIR": str(folder / gpu)})

    def read():
        for line in process.stdout:
            answer(*json.loads(line))
        error = process.stderr.read()
        for question in questions:  # those that it did not come to
            answer(question, None, f"the process ended: {error[-3000:]}")
    threading.Thread(target=read).start()
    return process


class Answers(dict):
    """{question: Future of its answer}"""

    def __call__(self, question, answer, error):
        if not self[question].done():
            self[question].set_result((answer, error))


@pytest.fixture(scope="session")
def proofs(tmp_path_factory):
    """A function that waits for the answer to a question. gpu: of one that is asked now."""
    folder, processes = tmp_path_factory.mktemp("gpu"), []
    fake_cuda.build(folder)
    answers = Answers()

    def wait(question, gpu=None):
        if gpu:
            # Of this process: one that ends later must not answer for another GPU.
            own = Answers({question: concurrent.futures.Future()})
            processes.append(ask(folder, gpu, [question], own))
            answers.update(own)
        answer, error = answers[question].result(timeout=1200)
        assert error is None, error
        return answer
    answers.update((q, concurrent.futures.Future()) for q in QUESTIONS)
    processes.append(ask(folder, "A100", QUESTIONS, answers))
    yield wait
    for process in processes:
        process.kill()


def numbers(found):
    """Those of a row of STEPS."""
    return [found[name] / unit for name, unit in NUMBERS.items()]


def assert_as_before(found, limits):
    worse = {name: (n, limit) for name, n, limit in zip(NUMBERS, found, limits) if n > 1.01 * limit}
    assert not worse, f"(now, before): {worse}"


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_compiled_step_takes_what_it_took(proofs, name):
    """In two graphs, forward and backward, without float32 logits or scores of attention."""
    found = proofs(f"step {name} {LAYERS[name]}", "H100")
    assert_as_before(numbers(found), STEPS[name])
    assert found["graphs"] == 2 and found["float32"] <= LARGEST


@pytest.mark.slow
def test_a_step_of_twelve_layers_takes_what_it_took(proofs):
    found = of_layers(12, proofs("step gpt2 1", "H100"),
                      proofs("step gpt2 2", "H100"))
    assert_as_before(numbers(found), TWELVE)
    assert TOKENS / sum(forecast(found, "H100").values()) > FORECAST


def test_the_forecast_adds_up_its_parts():
    """A second of each, of which 12% of the whole are lost on top."""
    none = dict(flops=0, attention=0, fused=0, triton=0, library=0)
    update = 124_475_904 * 40 / (3.35e12 * 0.9) / 15
    for more, name in ((dict(flops=989e12 * 0.59), "matrix products"),
                       (dict(fused=3.35e12 * 0.9), "fused kernels"),
                       (dict(triton=2e5, library=3e5), "launches"),
                       (dict(flops=2 * 989e12 * 0.27, attention=2 * 989e12 * 0.27), "attention")):
        parts = forecast(none | more, "H100")
        assert parts[name] == pytest.approx(1) and parts["update"] == pytest.approx(update)
        assert sum(parts.values()) == pytest.approx((1 + update) / 0.88)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["H100", "A100"])
@pytest.mark.parametrize("name", STEPS)
def test_kernels_compile(proofs, name, gpu):
    """For sm_90 and sm_80."""
    assert proofs(f"kernels {name}", gpu) > 10


@pytest.mark.ci
def test_attention_never_makes_its_scores(proofs):
    """Heads that share keys, and rows of their own lengths, have kernels that do without."""
    efficient, flash = (f"_scaled_dot_product_{n}_attention" for n in ("efficient", "flash"))
    assert proofs("attention_kernels") == {"MHA": [flash], "MHA, mask": [efficient],
                                           "GQA": [flash], "GQA, mask": [efficient]}


@pytest.mark.ci
def test_a_training_step_waits_for_nothing(proofs):
    """Of any model: nothing is sent between host and device, and no number is read."""
    found = proofs("train_crossings")
    assert len(found) == 11 and not any(found.values()), found


def test_a_token_waits_for_nothing(proofs):
    """Nor does sampling, with 1 and 16 texts, of one length and of many."""
    found = proofs("decode_crossings")
    assert len(found) == 3 and not any(found.values()), found


def test_a_crossing_would_be_seen(proofs):
    assert proofs("a_crossing") == {"aten.index.Tensor": 1}


@pytest.mark.ci
def test_models_are_compiled_whole(proofs):
    """fullgraph, in training (of some a step shows that above) and in evaluation."""
    assert proofs("whole") == {
        **dict.fromkeys(["gpt", "chat", "lora", "moe"], {"eval": 1}), "sae": {"train": 1},
        **dict.fromkeys(["dpo", "grpo", "distill", "memory", "classifier", "autoencoder"],
                        {"train": 1, "eval": 1})}


def test_a_token_is_one_cuda_graph(proofs):
    """Of `model.sample --compile`: nothing in it forbids that, and nothing it changes moves."""
    graph, = proofs("one_token")
    assert graph["why"] == [] and sum(graph["launches"]) > 10
