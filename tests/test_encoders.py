"""BERT, RoBERTa and ModernBERT as backbones of classifiers, with `transformers` as the oracle."""

import json

import numpy as np
import pytest
import torch
from runs import SMALL, WAYS, assert_a_kill_changes_nothing, assert_two_ranks_equal_one, metrics
from test_convert import assert_close, ids, shake

from data.labels import LabelledText, to_arrays
from data.prepare import labels as preparation
from data.tokenizer import open_tokenizer
from model import convert, sample
from model.convert.foreign import read_model
from model.core.load import load_model
from model.gpt import GPT, GPTConfig
from train.base.errors import SetupError
from train.config import load_config
from train.train import train

hf = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
load_file, save_file = (pytest.importorskip("safetensors.torch").__dict__[name]
                        for name in ("load_file", "save_file"))
SIZE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            vocab_size=300, max_position_embeddings=66, pad_token_id=0, bos_token_id=0,
            eos_token_id=2)
FAMILIES = {  # class of the configuration, of the model, and changes
    "bert": ("BertConfig", "BertModel", {}),
    "bert-masked-lm": ("BertConfig", "BertForMaskedLM", dict(hidden_act="gelu_new")),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", dict(pad_token_id=1)),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaModel", dict(pad_token_id=1)),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", dict(local_attention=8)),
    "modernbert-odd": ("ModernBertConfig", "ModernBertModel", dict(local_attention=11))}
TEXTS = ["The parser READS a file; it returns None.", "Import os, then open the file again!"] * 20


def make(folder, name):
    """A folder with random weights, and the model of `transformers` in it."""
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    config, kind, changes = FAMILIES[name]
    torch.manual_seed(5)
    model = shake(getattr(hf, kind)(getattr(hf, config)(**SIZE | changes)))
    model.save_pretrained(folder)
    return model


def build(folder):
    state = read_model(str(folder))
    model = GPT(GPTConfig(**state["model_args"]), is_backbone=True).eval()
    model.load_state_dict(state["model"])
    return model


@torch.no_grad()
def compare(ours, theirs):
    """The states of three texts of different lengths, in one batch."""
    idx = ids(T=40) // 2 + 3
    mask = torch.arange(40) < torch.tensor([40, 25, 3])[:, None]
    first = 2 if "roberta" in theirs.config.model_type else 0  # its positions after `pad_token_id`
    more = dict(position_ids=torch.arange(first, first + 40).expand(3, -1)) if first else {}
    wanted = theirs.base_model(input_ids=idx, attention_mask=mask.long(), **more).last_hidden_state
    assert_close(ours.trunk(idx, mask=mask[:, None, None])[mask], wanted[mask])


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_long_texts_in_bfloat16_beside_short_ones(name, tmp_path, monkeypatch):
    """More than one block of queries; the padding of a short text has no key in its window."""
    monkeypatch.setitem(SIZE, "max_position_embeddings", 400)
    theirs = make(tmp_path, name)
    ours = build(tmp_path)
    idx = ids(T=300) // 2 + 3
    mask = torch.arange(300) < torch.tensor([300, 290, 3])[:, None]
    wanted = theirs.base_model(input_ids=idx, attention_mask=mask.long()).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        states = ours.trunk(idx, mask=mask[:, None, None]).float()
    assert (states - wanted)[mask].abs().mean() < 0.03 * wanted.std()
    assert states.isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_states_are_those_of_transformers(name, tmp_path):
    theirs = make(tmp_path, name)
    compare(build(tmp_path), theirs)


def test_files_of_older_versions_are_read(tmp_path):
    """Google's BERT has gamma and beta, ModernBERT of 2024 has a number of layers per full one."""
    theirs = make(tmp_path / "bert", "bert-masked-lm")
    file = tmp_path / "bert" / "model.safetensors"
    save_file({n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"): t for n, t in load_file(file).items()}, file)
    compare(build(tmp_path / "bert"), theirs)
    theirs = make(tmp_path / "modern", "modernbert")
    path = tmp_path / "modern" / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    assert config.pop("layer_types") == [f"{'full' if i % 3 == 0 else 'sliding'}_attention"
                                         for i in range(4)]
    path.write_text(json.dumps(config | dict(
        layer_norm_eps=1e-5, position_embedding_type="absolute", reference_compile=None,
        global_attn_every_n_layers=3, global_rope_theta=rope["full_attention"]["rope_theta"],
        local_rope_theta=rope["sliding_attention"]["rope_theta"])))
    compare(build(tmp_path / "modern"), theirs)


@pytest.mark.parametrize("changes, message", [
    (dict(position_embedding_type="relative_key"), "position_embedding_type: 'relative_key'"),
    (dict(norm_position="x"), "norm_position: 'x'"),
    (dict(hidden_act="relu"), "'relu', expected"), (dict(is_decoder=True), "is_decoder: True"),
    (dict(num_hidden_layers=5), "h.4")])
def test_what_no_encoder_here_computes_is_refused(changes, message, tmp_path, capsys):
    make(tmp_path, "bert")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert convert.main(["--ckpt", str(tmp_path), "--to", str(tmp_path / "o.pt")]) == 2
    assert message in capsys.readouterr().err


# -----------------------------------------------------------------------------
# tokenizers

def save_tokenizer(folder, kind):
    """WordPiece in lower case, with [CLS] and [SEP]; or byte pairs with RoBERTa's <s> and </s>."""
    special = ["<s>", "<pad>", "</s>"]
    if kind == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        made.normalizer = tokenizers.normalizers.BertNormalizer()
        made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        made.decoder = tokenizers.decoders.WordPiece()
        trainer = tokenizers.trainers.WordPieceTrainer
        frame = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer
        frame = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.train_from_iterator(TEXTS, trainer(vocab_size=290, special_tokens=special,
                                            show_progress=False))
    made.post_processor = frame
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_text_is_framed_and_the_evidence_found(kind, tmp_path):
    theirs = save_tokenizer(tmp_path, kind)
    ours = open_tokenizer(str(tmp_path))
    text = TEXTS[0]
    wanted = theirs.encode(text)
    start, end = text.index("READS"), text.index("READS a") + len("READS a")
    rows = [LabelledText(text, "a", ((a, b),), "")
            for a, b in ((start, end), (len(text) - 1, len(text)))]
    arrays = to_arrays(rows, ours, ["a"], 512)
    assert arrays["tokens"][0].tolist() == wanted.ids
    inside = [i for i, (a, b) in enumerate(wanted.offsets) if a < end and b > start]
    assert arrays["spans"].tolist() == [[inside[0], inside[-1]], [len(wanted.ids) - 2] * 2]
    assert ours.decode(wanted.ids[inside[0]:inside[-1] + 1]).strip().lower() == "reads a"
    assert to_arrays(rows, ours, ["a"], 512, framed=False)["tokens"].tolist() == [
        wanted.ids[1:-1]] * 2
    empty = to_arrays([LabelledText("", "a", [(0, 1)], "")], ours, ["a"], 512)
    assert (empty["lengths"], empty["spans"].tolist()) == ([2], [[-1, -1]])
    # Cut: the text becomes shorter, the last token stays, and the evidence of the second is lost.
    cut = to_arrays(rows, ours, ["a"], len(wanted.ids) - 1)
    assert cut["tokens"][0].tolist() == wanted.ids[:-2] + wanted.ids[-1:]
    assert cut["spans"].tolist() == [[inside[0], inside[-1]], [-1, -1]]


def test_a_space_alone_is_no_evidence_of_a_tokenizer_without_spaces(tmp_path):
    save_tokenizer(tmp_path, "bert")
    row = LabelledText(TEXTS[0], "a", ((3, 4),), "")
    arrays = to_arrays([row], open_tokenizer(str(tmp_path)), ["a"], 512)
    assert arrays["spans"].tolist() == [[-1, -1]]


# -----------------------------------------------------------------------------
# runs

@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT with a tokenizer, and a folder of labelled texts prepared with it."""
    folder = tmp_path_factory.mktemp("encoder")
    make(folder / "bert", "bert")
    save_tokenizer(folder / "bert", "bert")
    rng = np.random.default_rng(0)
    words = "the parser reads a file import os open again returns none then".split()
    rows = []
    for i in range(120):
        text = " ".join(rng.choice(words, 12)) + (" good" if i % 2 else " bad")
        rows.append(dict(text=text, label="ab"[i % 2], evidence=text.split()[-1]))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "data"
    assert preparation.main([str(folder / "rows.jsonl"), "--out", str(out),
                             "--tokenizer", str(folder / "bert")]) == 0
    return folder


def test_max_tokens_leave_space_for_a_text(encoder, tmp_path, capsys):
    assert preparation.main([str(encoder / "rows.jsonl"), "--out", str(tmp_path / "out"),
                             "--tokenizer", str(encoder / "bert"), "--max_tokens", "2"]) == 2
    assert "--max_tokens 2: the tokenizer puts 2 tokens around" in capsys.readouterr().err


def test_a_classifier_learns_from_an_encoder(encoder, tmp_path):
    """With the shape of the weights."""
    train(load_config("train/configs/classifier.yaml", overrides=dict(
        data_dir=str(encoder / "data"), init_from=str(encoder / "bert"), out_dir=str(tmp_path),
        ngrams=0, bidirectional=False, max_epochs=None, max_iters=60, eval_interval=30,
        warmup_iters=3, learning_rate=3e-3, num_threads=1, dtype="float32")))
    losses = [line["val_label_loss"] for line in metrics(tmp_path) if "val_loss" in line]
    # The ids of WordPiece's trainer, and with them the run, differ from process to process.
    assert losses[0] > 0.6 and min(losses) < 0.35
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert state["model_args"]["causal"] is False
    assert state["model_args"]["norm_position"] == "stream"
    model, _ = load_model(str(tmp_path / "ckpt.pt"))
    idx = ids(T=9) % 290
    states = model.gpt.trunk(idx, mask=torch.ones(1, 1, 1, 9, dtype=torch.bool))  # no causal mask
    scores, spans = model(idx, torch.tensor([9, 9, 2]))
    assert_close(scores[:2], model.head(states.mean(1))[:2])
    # No evidence in [CLS] and [SEP], wherever the scores are highest; a text may have no others.
    lengths = torch.tensor([9] * 63 + [2])
    idx = ids(rows=64, T=9) % 290
    found = []
    for _ in range(20):
        for p in [*model.end.parameters(), *model.start.parameters()]:
            torch.nn.init.normal_(p)
        spans = model(idx, lengths)[1]
        found.append(spans[:63])
    assert model.spec["frame"] == [1, 1]
    assert torch.cat(found).min() == 1 and torch.cat(found).max() == 7
    assert model(idx, lengths, lengths * 0, spans.index_fill(0, torch.tensor(63), -1))[0].isfinite()


SHAPE = dict(n_layer=4, n_head=4, n_embd=32, n_hidden=48, block_size=24, vocab_size=None)
RUN = SHAPE | dict(model="classifier", bidirectional=False, ngrams=0, max_iters=12,
                   save_interval=4, eval_interval=6)


@pytest.mark.matrix(133)
def test_killed_while_an_encoder_is_trained(encoder, tmp_path):
    """kill -9 while a classifier learns from a pretrained encoder -> the end is exact"""
    assert_a_kill_changes_nothing(encoder / "data", tmp_path,
                                  **RUN | dict(init_from=str(encoder / "bert")))


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_an_encoder_as_one(encoder, tmp_path, way):
    settings = SMALL | RUN | dict(init_from=str(encoder / "bert"), data_dir=str(encoder / "data"))
    assert_two_ranks_equal_one(tmp_path, settings, way, val_loss=1e-5, val_span_loss=1e-5)


def test_no_language_model_is_made_of_an_encoder(data_dir, tmp_path, capsys):
    make(tmp_path / "bert", "bert")
    path = str(tmp_path / "bert")
    assert sample.main(["--ckpt", path, "--tokenizer", "byte"]) == 2
    assert "no language model" in capsys.readouterr().err
    assert convert.main(["--ckpt", path, "--to", str(tmp_path / "out")]) == 2
    assert "an encoder, such as BERT, is no language model" in capsys.readouterr().err
    changes = dict(data_dir=str(data_dir), out_dir=str(tmp_path / "x"), init_from=path)
    with pytest.raises(SetupError, match="no language model"):
        train(load_config("train/config_test.yaml", overrides=changes))
