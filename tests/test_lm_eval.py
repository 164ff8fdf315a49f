"""A checkpoint in the harness, and the tasks of a run against the harness's `hf` model."""

import functools
import json
import shutil
import sys
from dataclasses import asdict

import pytest
import torch
from quiz import Quiz
from test_convert import save_llama

from data.chat_template import DEFAULT_SPEC
from model import convert
from model import sample as sampling
from model.core.generate import encode_prompt, generate
from model.core.load import load_model
from model.eval import lm_eval, tasks
from model.gpt import GPT, GPTConfig
from train.checkpoint import save_checkpoint

TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
              "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
              "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{long}}'\n"
               "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n",
    "writing": "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
               "doc_to_target: '{{question}}'\n"
               "generation_kwargs: {until: ['e', 'zz'], max_gen_toks: 6, do_sample: false}\n"
               "metric_list: [{metric: exact_match}]\n"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a byte model that says different things, and tasks on a local file."""
    for name in ("lm_eval", "transformers"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("eval")
    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257)
    model = GPT(GPTConfig(**shape))
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.data += torch.randn(p.shape, generator=generator) * 0.2
    spec = dict(vocab_size=257, tokenizer={"kind": "byte"})
    save_checkpoint(str(folder / "ckpt.pt"), dict(
        model=model.state_dict(), model_args=asdict(model.config), spec=spec, format_version=1,
        config=asdict(model.config) | dict(model="gpt")))
    docs = [dict(question=f"{w} is the word number {i}, of" + " many" * i,
                 long=f"{w}, {w}! \u00e9 " * 9, choices=[w, w[::-1] + str(i), " so?"], answer=i % 3)
            for i, w in enumerate(["stone", "river", "cloud", "tree", "fox", "a"])]
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: local_{name}\ndataset_path: json\ntest_split: test\nnum_fewshot: 0\n"
            f"dataset_kwargs: {{data_files: {{test: '{folder}/docs.jsonl'}}}}\n{text}")
    return folder


@pytest.fixture(scope="module")
def llama(folder):
    """A folder with a tiny Llama whose texts begin with <s>, and its export."""
    save_llama(folder / "llama")
    assert convert.main(["--ckpt", str(folder / "llama"), "--to", str(folder / "export")]) == 0
    return folder / "llama"


@pytest.fixture(scope="module")
def trained(data_dir, tmp_path_factory):
    return Quiz(data_dir, tmp_path_factory.mktemp("quiz"))


@pytest.fixture(autouse=True)
def quick_and_offline(monkeypatch, tmp_path, folder):
    """Without reading the thousands of files of the harness's own tasks, and this machine's."""
    from lm_eval import evaluator, tasks
    only_ours = functools.partialmethod(tasks.TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(tasks.TaskManager, "__init__", only_ours)
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))


@pytest.mark.ci
def test_the_numbers_are_those_of_the_exported_folder(folder, capsys, tmp_path):
    """Choices with contexts that are too long, rolling texts and greedy answers, as typed."""
    names = [f"local_{name}" for name in TASKS]
    out = tmp_path / "none" / "ours.json"
    assert lm_eval.main(["--ckpt", str(folder / "ckpt.pt"), "--tasks", ",".join(names),
                         "--device=cpu", "--batch_size=5", "--include_path", str(folder),
                         "--limit=5", "--out", str(out)]) == 0
    assert "local_choice" in capsys.readouterr().out
    ours = json.loads(out.read_text())
    assert convert.main(["--ckpt", str(folder / "ckpt.pt"), "--to", str(folder / "hf")]) == 0
    theirs = by_hf(folder / "hf", names, folder, limit=5)["results"]
    numbers = {(task, k): v for task in names for k, v in theirs[task].items()
               if isinstance(v, float) and "stderr" not in k}
    assert len(numbers) >= 4 and numbers[names[1], "bits_per_byte,none"] > 1
    for (task, k), v in numbers.items():
        assert ours["results"][task][k] == pytest.approx(v, rel=1e-5), (task, k)
    assert ours["n-samples"]["local_choice"]["effective"] == 5 and "samples" not in ours


def by_hf(path, names, include_path, **options):
    """Results of the harness for the tasks `names` and a Hugging Face folder."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    return simple_evaluate(
        "hf", model_args=dict(pretrained=str(path), dtype="float32", logits_cache=False),
        tasks=names, batch_size=4, device="cpu",
        task_manager=TaskManager(include_path=str(include_path)), **options)


@pytest.mark.parametrize("name", ["llama", "export"])
def test_tasks_of_a_tokenizer_that_begins_texts(folder, llama, name):
    """Also without a question."""
    names, path = ["local_choice", "local_unasked"], str(folder / name)
    (folder / "unasked.yaml").write_text((folder / "choice.yaml").read_text().replace(
        "local_choice", "local_unasked").replace("'{{question}}'", "''"))
    theirs = by_hf(path, names, folder)["samples"]
    model, tokenizer = load_model(path)
    reader = tasks.ExampleReader(tokenizer, None, model.config.block_size)
    for task, changes in (("local_choice", {}), ("local_unasked", dict(question=""))):
        for sample in theirs[task]:
            row = reader.parse(sample["doc"] | changes, 0)
            wanted = [float(p) for p, _ in sample["filtered_resps"]]
            found = [p for p, _ in tasks.score_sequences(model, row.sequences)]
            assert found == pytest.approx(wanted, rel=1e-5)


def test_texts_end_at_any_of_the_end_tokens_that_a_model_names(folder, llama, tmp_path, capsys):
    """As those of instruct models, which name two: also without the chat template."""
    path = tmp_path / "ends"
    shutil.copytree(llama, path)
    model, tokenizer = load_model(llama)
    docs = [json.loads(line)["question"] for line in open(folder / "docs.jsonl")]
    special = {*tokenizer.special.values()}
    written = [generate(model, torch.tensor([encode_prompt(tokenizer, text)]), 9, 0)[0, -9:]
               for text in docs]
    prompt, n, end = next((text, n, i) for text, ids in zip(docs, written, strict=True)
                          for n, i in enumerate(ids[:-1].tolist(), 1) if i in special)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(content | dict(eos_token_id=[257, end])))
    for more in ([], ["--num_samples=2"]):
        assert sampling.main([f"--ckpt={path}", "--prompt", prompt, "--temperature=0",
                              "--max_new_tokens=9", "--dtype=float32", *more]) == 0
        assert f"[{n * (1 + len(more))} tokens" in capsys.readouterr().err


def test_a_chat_model_is_asked_in_its_own_format(folder, tmp_path):
    """With an earlier turn as example; --log_samples writes each rendered text and answer."""
    state = torch.load(folder / "ckpt.pt")
    shape = state["model_args"] | dict(block_size=256)
    state["spec"] |= dict(template=dict(DEFAULT_SPEC))
    save_checkpoint(str(tmp_path / "ckpt.pt"), state | dict(model_args=shape))
    names = ["local_choice", "local_writing"]
    for name in names:
        text = (folder / f"{name.removeprefix('local_')}.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text(text.replace("num_fewshot: 0", "description: 'Hi'"))
    options = ["--ckpt", str(tmp_path / "ckpt.pt"), "--tasks", ",".join(names), "--device=cpu",
               "--include_path", str(tmp_path), "--apply_chat_template", "--num_fewshot=1"]
    assert lm_eval.main([*options, "--out", str(tmp_path / "a.json"), "--log_samples"]) == 0
    assert convert.main(["--ckpt", str(tmp_path / "ckpt.pt"), "--to", str(tmp_path / "hf")]) == 0
    theirs = by_hf(tmp_path / "hf", names, tmp_path, num_fewshot=1, apply_chat_template=True)[
        "samples"]
    for task in names:
        rows = json.loads((tmp_path / "a.json").read_text())["samples"][task]
        for a, b in zip(rows, theirs[task], strict=True):
            assert a["arguments"][0][0] == b["arguments"][0][0]
            assert a["arguments"][0][0].startswith("### System:\nHi")
            assert a["arguments"][0][0].count("### Assistant:") == 2  # the example, and the prompt
            assert flat(a["filtered_resps"]) == pytest.approx(flat(b["filtered_resps"]), abs=1e-4)


def test_a_model_is_read_with_its_own_tokenizer(folder, tmp_path):
    """Not with that of Qwen, which composes accents, because its class is Qwen2's."""
    state = torch.load(folder / "ckpt.pt")
    shape = state["model_args"] | dict(qkv_bias=True)
    weights = GPT(GPTConfig(**shape)).state_dict() | state["model"]
    save_checkpoint(str(tmp_path / "ckpt.pt"), state | dict(model=weights, model_args=shape))
    docs = (folder / "docs.jsonl").read_text().replace("many", "mane\u0301")
    (tmp_path / "docs.jsonl").write_text(docs)
    text = (folder / "choice.yaml").read_text().replace(str(folder), str(tmp_path))
    (tmp_path / "choice.yaml").write_text(text)
    assert lm_eval.main(["--ckpt", str(tmp_path / "ckpt.pt"), "--tasks=local_choice",
                         "--device=cpu", "--include_path", str(tmp_path), "--log_samples",
                         "--out", str(tmp_path / "a.json")]) == 0
    model, tokenizer = load_model(tmp_path / "ckpt.pt")
    reader = tasks.ExampleReader(tokenizer, None, model.config.block_size)
    for sample in json.loads((tmp_path / "a.json").read_text())["samples"]["local_choice"]:
        row = reader.parse(sample["doc"], 0)
        found = [p for p, _ in tasks.score_sequences(model, row.sequences)]
        assert found == pytest.approx([float(p) for p, _ in sample["filtered_resps"]], rel=1e-5)


def flat(values):
    """Numbers as they are, texts as their characters' codes."""
    out = []
    for v in values:
        out += flat(v) if isinstance(v, (list, tuple)) else (
            [ord(c) for c in v] if isinstance(v, str) else [float(v)])
    return out


def test_what_is_missing_is_one_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lm_eval.simple_evaluate", None)  # not called
    options = ["--include_path", str(folder), "--tasks"]
    args = ["--ckpt", str(folder / "ckpt.pt"), *options]
    assert lm_eval.main([*args, "local_nothing"]) == 2
    assert "the harness has no local_nothing" in capsys.readouterr().err
    assert lm_eval.main([*args, "local_choice", "--log_samples"]) == 2
    assert "--log_samples: needs --out" in capsys.readouterr().err
    assert lm_eval.main([*args, "local_choice", "--apply_chat_template"]) == 2
    assert "ckpt.pt is not a chat model" in capsys.readouterr().err
    assert lm_eval.main([*args, "local_choice", "--out", str(folder)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    state = torch.load(folder / "ckpt.pt")
    for name, change, message in (
            ("unknown", dict(spec=dict(vocab_size=257)), "needs a tokenizer with an end of text"),
            ("own", dict(model_args=state["model_args"] | dict(mlp="relu2")),
             "eval_tasks evaluates models")):
        save_checkpoint(str(tmp_path / f"{name}.pt"), state | change)
        assert lm_eval.main(["--ckpt", str(tmp_path / f"{name}.pt"), *options,
                             "local_choice"]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    assert lm_eval.main([*args, "x"]) == 2
    assert "pip install lm-eval[hf]" in capsys.readouterr().err


# -----------------------------------------------------------------------------
# the tasks of a run (model/eval/tasks.py) beside the harness's

OWN = {
    "choice": TASKS["choice"],
    "cloze": "output_type: loglikelihood\ndoc_to_text: '{{context}}'\n"
             "doc_to_target: '{{continuation}}'\ntarget_delimiter: ''\n"
             "metric_list: [{metric: acc}]\n",
    "written": "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
               "doc_to_target: '{{answer}}'\nmetric_list: [{metric: exact_match}]\n"
               "filter_list: [{name: none, filter: [{function: remove_whitespace}, "
               "{function: take_first}]}]\n"
               "generation_kwargs: {until: [\"\\n\"], max_gen_toks: 20, do_sample: false}\n"}


@pytest.mark.ci
def test_tasks_of_a_run_have_the_harness_numbers(folder, trained):
    """Three tasks of 200 rows: accuracies exactly those of `hf` on the exported folder, each log
    probability within 1e-6 of itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    own = folder / "own"
    own.mkdir()
    for name, text in OWN.items():
        (own / f"{name}.yaml").write_text(
            f"task: own_{name}\ndataset_path: json\ntest_split: test\nnum_fewshot: 0\n"
            f"dataset_kwargs: {{data_files: {{test: '{trained.folder}/{name}.jsonl'}}}}\n{text}")
    ours = trained.evaluate(own / "run")
    assert convert.main(["--ckpt", trained.ckpt, "--to", str(own / "hf")]) == 0
    found = simple_evaluate("hf", model_args=dict(pretrained=str(own / "hf"), dtype="float32"),
                            tasks=[f"own_{name}" for name in OWN], batch_size=50, device="cpu",
                            task_manager=TaskManager(include_path=str(own)))
    for name, key, metric in (("choice", "", "acc"), ("choice", "_norm", "acc_norm"),
                              ("cloze", "", "acc"), ("written", "", "exact_match")):
        number = found["results"][f"own_{name}"][f"{metric},none"]
        assert ours[f"val_{name}{key}"] == pytest.approx(number, abs=1e-12), (name, key)
        assert 0.1 < number < 0.95, (name, key, number)  # which says something
    assert ours["val_choice"] != ours["val_choice_norm"]
    model, tokenizer = load_model(trained.ckpt)
    reader = tasks.ExampleReader(tokenizer, None, model.config.block_size)
    for path, name in zip(trained.files(), ("own_choice", "own_cloze")):
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        for row, sample in zip(reader.read(path, 0), samples, strict=True):
            theirs = [(float(p), str(best) == "True") for p, best in sample["filtered_resps"]]
            ours = tasks.score_sequences(model, row.sequences)
            assert flat(ours) == pytest.approx(flat(theirs), rel=1e-6, abs=1e-6)
