"""The table of included models: what it holds, what it fills in for presets, and weights that an installation lacks."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import visspec
from visspec import registry
from visspec.api.text.accelerate import default_drafter
from visspec.io import included
from visspec.presets import PRESETS
from visspec.toys.table import INCLUDED


def model(name):
    return SimpleNamespace(config=AutoConfig.from_pretrained(included.folder(name)))


def test_table_matches_folders():
    folders = {path.parent.name for path in included.FOLDER.glob("*/config.json")}
    assert {included.folder(name).name for name in INCLUDED.models} == folders
    targets = {row.target for row in INCLUDED.models.values()} - {""}
    assert targets | {INCLUDED.text_model, INCLUDED.image_model} <= set(INCLUDED.models)
    references = [(world.detector_reference, world.render_reference) for world in INCLUDED.worlds.values()]
    assert all(callable(included.load(reference)) for reference in (INCLUDED.foreign, *sum(references, ())))


@pytest.mark.parametrize("name,preset,expected", [
    ("painter", "drafter", "painter-eagle"), ("painter", "naive", "painter-eagle"),
    ("painter", "distilled", "painter-distilled"), ("painter-emoji", "drafter", "painter-emoji-eagle"),
])  # fmt: skip
def test_presets_use_included_drafters(name, preset, expected):
    pipe = visspec.ImagePipeline.from_pretrained(name)
    assert pipe.setup(**registry.preset(preset, "codes").method).name == expected
    drafters = {registry.parse(one.drafter)[0] for by in PRESETS.values() for one in by.values()}
    assert drafters - {"auto"} <= set(registry.table("drafter"))


def test_default_drafter_is_included():
    assert registry.included_drafter(model("captioner")) == "vispec"
    assert registry.included_drafter(model("captioner-emoji")) == "vispec-emoji"
    assert registry.included_drafter(model("captioner-smollm2")) == "vispec-smollm2"
    assert registry.included_drafter(model("captioner"), "image-eagle") is None is registry.included_drafter(object())


def test_reason_of_included_table():
    config = json.loads((included.folder("smollm2-context") / "config.json").read_text())["target"]
    with torch.device("meta"):
        smollm2 = AutoModelForCausalLM.from_config(LlamaConfig(**config))
    assert default_drafter(smollm2) == ("context", "its table is made for the model")


def test_missing_weights(tmp_path, monkeypatch):
    captioner = model("captioner")
    monkeypatch.setattr(included, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"^checkpoint: the weights of 'painter-mar' are not in .*\. The repo"):
        registry.included_folder("painter-mar")
    with pytest.raises(ValueError, match=r"^drafter: the weights of 'vispec' are not in .*\. The repo"):
        registry.drafter("vispec", captioner)
    assert registry.included_drafter(captioner) is None
    assert [str(registry.included_folder(name)) for name in ("a/painter-mar", "no")] == ["a/painter-mar", "no"]
