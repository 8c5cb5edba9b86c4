"""Accelerated models and drafters that are saved, pushed and read back; the hub is a folder here."""

import json
import re
import shutil

import pytest
import torch

import visspec
from tests.doubles import raises_line
from tests.test_assistants import block_assistant, muse_glimmer
from tests.test_assistants import prompt as text_prompt
from tests.test_eagle_heads import make
from tests.test_published import cached, eagle_3, saved, speculators_dflash, z_lab
from tests.tiny import llama, model_of, prompt, shapes
from visspec import registry
from visspec.cli.arguments import ModelOptions, load
from visspec.models.eagle.drafter import EagleDrafter

GREEDY = {"max_new_tokens": 10, "do_sample": False}


def drafts(fast, inputs):
    """What was drafted in each round."""
    state = fast.run(**inputs, **GREEDY).state
    return [(r.levels, r.committed) for r in state.trace.rounds]


def same(fast, again, inputs):
    assert torch.equal(fast.generate(**inputs, **GREEDY), again.generate(**inputs, **GREEDY))
    assert again.name in (fast.name, "drafter") and again.rule.traits == fast.rule.traits
    assert drafts(fast, inputs) == drafts(again, inputs)


@pytest.mark.parametrize("how", ["name", "options", "object", "folder", "published", "published-options", "block"])
def test_an_accelerated_model_is_read_back(tmp_path, how):
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    head = str(saved(tmp_path / "head", *eagle_3()))
    make("llava", "vispec").save_pretrained(tmp_path / "ours", {"seed": 4})
    drafter = {
        "name": "ngram", "options": "context:shared=false", "object": make("llava", "eagle3"),
        "folder": str(tmp_path / "ours"),
        "published": head, "published-options": f"{head}:width=3,images=slots",
        "block": str(saved(tmp_path / "block", *speculators_dflash())),
    }[how]  # fmt: skip
    fast = visspec.accelerate(model, drafter, levels=3, adaptive=False)
    fast.save_pretrained(tmp_path / "all")
    again = visspec.Accelerated.from_pretrained(tmp_path / "all", adaptive=False)
    assert again.tokenizer is None and again.setup.drafter.traits.trees == fast.setup.drafter.traits.trees
    same(fast, again, inputs)
    if how == "folder":
        assert json.loads((tmp_path / "all" / "drafter" / "provenance.json").read_text()) == {"seed": 4}
    assert type(model).from_pretrained(tmp_path / "all").config.model_type == "llava"  # as stock reads it


def test_given_wins_over_saved(tmp_path):
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["one"])
    visspec.accelerate(model, make("llava", "eagle3"), levels=3).save_pretrained(tmp_path)
    options = {"drafter": "ngram", "acceptance": "typical", "levels": 2, "batch_invariant": True}
    again = visspec.Accelerated.from_pretrained(tmp_path, **options)
    assert again.name == "ngram" and type(again.rule).__name__ == "Typical"
    again.save_pretrained(tmp_path)
    last = visspec.Accelerated.from_pretrained(str(tmp_path))
    assert last.name == "ngram" and type(last.rule).__name__ == "Typical" and last.target.widths is not None
    assert last.generate(**inputs, **GREEDY).shape == model.generate(**inputs, **GREEDY).shape
    model.save_pretrained(tmp_path / "bare")
    assert visspec.Accelerated.from_pretrained(tmp_path / "bare", drafter=None).name == "none"


def test_a_model_knows_its_drafter(tmp_path):
    """By `visspec.json` in its folder, or because one is included; what is given wins."""
    pytest.importorskip("visspec.toys")
    for name, own in {"captioner": "vispec", "captioner-emoji": "vispec-emoji"}.items():
        fast, _ = load(ModelOptions(model=name))
        assert (fast.name, visspec.accelerate(fast.model, "ngram").name) == (own, "ngram")
    bare = model_of("llava")
    assert visspec.accelerate(bare).name == "context"
    for written, name in ((make("llava", "eagle3"), "drafter"), ("ngram", "ngram"), (None, "context")):
        folder = tmp_path / name
        visspec.accelerate(bare, written).save_pretrained(folder)
        model = type(bare).from_pretrained(folder)
        fast = visspec.accelerate(model)
        assert fast.name == name and visspec.accelerate(model, "ngram").name == "ngram"
        fast.save_pretrained(folder / "again")
        assert visspec.Accelerated.from_pretrained(folder / "again").name == name
        chosen = json.loads((folder / "again" / "visspec.json").read_text())["drafter"] == "auto"
        assert chosen == (name == "context"), "what the library chose is chosen again, and what a folder names is named"
        assert visspec.accelerate(type(bare).from_pretrained(folder / "again")).name == name
    (folder / "visspec.json").write_text('{"drafter": {"folder": "../elsewhere"}}')
    with pytest.raises(ValueError, match="drafter of"):
        visspec.accelerate(model)


@pytest.mark.parametrize("kind", ["assistant", "folder"])
def test_small_model_saved(tmp_path, kind):
    """An assistant of transformers, or a small model by its folder, which may then go."""
    llama(1).save_pretrained(tmp_path / "small")
    target, drafter = (muse_glimmer(), block_assistant()) if kind == "assistant" else (llama(), str(tmp_path / "small"))
    fast = visspec.accelerate(target, drafter, adaptive=False)
    fast.save_pretrained(tmp_path / "all")
    shutil.rmtree(tmp_path / "small")
    same(fast, visspec.Accelerated.from_pretrained(tmp_path / "all", adaptive=False), text_prompt((9, 4)))


@pytest.mark.parametrize("change,sentence", [
    ({"drafter": {"folder": "drafter", "options": "width=../x"}}, "options of"),
    ({"drafter": {"folder": "drafter", "more": 1}}, "drafter of"),
    ({"order": "islands"}, "is a pipeline with order"),
])  # fmt: skip
def test_settings_of_others_are_not_believed(tmp_path, change, sentence):
    visspec.accelerate(model_of("llava"), make("llava", "eagle3"), levels=3).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "visspec.json").read_text())
    (tmp_path / "visspec.json").write_text(json.dumps(settings | change))
    with raises_line(re.escape(sentence)):
        visspec.Accelerated.from_pretrained(tmp_path)


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(cache, monkeypatch):
    """A hub whose repositories are put into the cache."""
    import huggingface_hub

    made = []

    class Api:
        def create_repo(self, name, private=None, exist_ok=False):
            made.append((name, private))
            return f"https://hub/{name}"

        def upload_folder(self, repo_id, folder_path, commit_message):
            snapshot = cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / "abc"
            shutil.copytree(folder_path, snapshot)
            (snapshot.parents[1] / "refs").mkdir()
            (snapshot.parents[1] / "refs" / "main").write_text("abc")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return made


def test_push_drafters(hub, tmp_path):
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["one"])
    drafter = make("llava", "eagle3")
    assert drafter.push_to_hub("me/head", {"seed": 1}, private=True) == "https://hub/me/head"
    assert hub == [("me/head", True)]
    again = EagleDrafter.from_pretrained("me/head", model)
    assert again.config == drafter.config
    same(visspec.accelerate(model, drafter, adaptive=False), visspec.accelerate(model, again, adaptive=False), inputs)
    assert visspec.accelerate(model, "me/head:width=2").drafter.traits.trees
    EagleDrafter.for_model(model).push_to_hub("me/ours")
    assert visspec.accelerate(model, "me/ours").name == "ours"
    block, _ = registry.drafter(str(saved(tmp_path / "block", *z_lab())), model)
    block.push_to_hub("me/block")
    assert visspec.accelerate(model, "me/block").drafter.traits.levels == 3


def test_push_accelerated(hub):
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["one"])
    fast = visspec.accelerate(model, make("llava", "eagle3"), levels=3, adaptive=False)
    assert fast.push_to_hub("me/fast-llava") == "https://hub/me/fast-llava"
    same(fast, visspec.Accelerated.from_pretrained("me/fast-llava", adaptive=False), inputs)


def test_hub_drafter_saved(hub, cache, tmp_path):
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["one"])
    cached(cache, "someone/head", *eagle_3())
    fast = visspec.accelerate(model, "someone/head", adaptive=False)
    fast.save_pretrained(tmp_path / "all")
    shutil.rmtree(cache)
    again = visspec.Accelerated.from_pretrained(tmp_path / "all", adaptive=False)
    assert torch.equal(fast.generate(**inputs, **GREEDY), again.generate(**inputs, **GREEDY))
