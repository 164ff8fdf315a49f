"""meta.json: one reader and one writer for all kinds of prepared data, of earlier versions too."""

import json

import pytest

from data.meta import Meta, prepared_model, read_meta, read_meta_for, write_meta
from train.base.errors import DataError


@pytest.mark.parametrize("keys, model", [
    (dict(kind="chat"), "chat"), (dict(kind="pairs", model="dpo"), "dpo"),
    (dict(kind="prompts", model="grpo"), "grpo"), (dict(kind="prompts"), "grpo"),
    (dict(kind="features", model="autoencoder"), "autoencoder"), (dict(kind="pairs"), "dpo"),
    (dict(model="classifier"), "classifier"), (dict(model="mine"), "mine"), ({}, "gpt")])
def test_folders_of_earlier_versions_are_for_their_model(tmp_path, keys, model):
    (tmp_path / "meta.json").write_text(json.dumps(dict(
        format_version=1, sources=["a"], block_size=8, **keys)))
    assert prepared_model(tmp_path) == read_meta(tmp_path).model == model
    assert read_meta_for(model, tmp_path, "make it", "block_size").block_size == 8
    with pytest.raises(DataError, match=f"no data for --model other; it is "
                       f"for --model {model}; make it"):
        read_meta_for("other", tmp_path, "make it")


def test_what_nothing_names_is_for_any_model(tmp_path):
    assert prepared_model(tmp_path) is None and read_meta(tmp_path) == Meta()
    (tmp_path / "meta.json").write_text('{"block_size": 8}')
    assert prepared_model(tmp_path) is None
    assert read_meta_for("chat", tmp_path, "make it", "block_size").block_size == 8
    with pytest.raises(DataError, match="no template in a meta.json there; make it"):
        read_meta_for("chat", tmp_path, "make it", "block_size", "template")
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(DataError, match="meta.json: .*prepare the data again"):
        prepared_model(tmp_path)
    (tmp_path / "train.bin").write_bytes(b"xx")
    assert prepared_model(tmp_path) == "gpt"


def test_what_is_written_is_read(tmp_path):
    meta = Meta("dpo", vocab_size=300, tokenizer=dict(kind="char", chars="ab"), block_size=16,
                template=dict(user="{}"), splits=dict(train=dict(pairs=3)), sources=["x"],
                extra=dict(reference="0f", names=[], nothing=None))
    write_meta(tmp_path, meta)
    assert read_meta(tmp_path) == meta
    content = json.loads((tmp_path / "meta.json").read_text())
    assert content["reference"] == "0f"  # all at the top level
    assert not content.keys() & {"dtype", "incomplete", "eot_token"}
    write_meta(tmp_path, Meta("gpt", "uint16", sources=["x"]))
    assert json.loads((tmp_path / "meta.json").read_text()) == dict(
        format_version=1, model="gpt", dtype="uint16", sources=["x"])


def test_an_incomplete_folder_is_refused(tmp_path):
    write_meta(tmp_path, Meta("chat", sources=["x"], incomplete=True))
    with pytest.raises(DataError, match="its preparation was interrupted; prepare the data again"):
        read_meta(tmp_path)
    assert read_meta(tmp_path, allow_incomplete=True).sources == ["x"]


def test_a_later_format_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text('{"format_version": 2}')
    with pytest.raises(DataError, match="meta.json: format_version 2 of a later ironGPT"):
        read_meta(tmp_path)
