"""What follows a training: its card, how to load the drafter, and the form for other engines."""

import json

import pytest

import visspec
from tests.doubles import raises_line
from tests.tiny import model_of, prompt
from tests.training_processes import pictures
from visspec import registry
from visspec.api import loading
from visspec.api.training import drafter as train_drafter
from visspec.api.training import export as drafter_export
from visspec.cli.main import main

TINY = {"steps": 2, "rows": 2, "max_new_tokens": 6, "group": 1, "reuse": 1, "unroll": 2}


@pytest.fixture
def data(tmp_path, monkeypatch):
    pictures(tmp_path / "data")
    monkeypatch.setattr(loading, "load", lambda *a, **k: (model_of("llava"), None))
    monkeypatch.setattr(train_drafter, "prepare", lambda p, chats, media, m: prompt("llava", ["4 i 5"] * len(chats)))
    return tmp_path / "data"


def train(data, name, **options):
    train_drafter.run("owner/target", data, data.parent / name, **TINY, **options)
    return data.parent / name


def test_run_writes_card(data, capsys):
    out = train(data, "out", preset="eagle3", draft_vocab=40)
    card, progress = (out / "README.md").read_text(), json.loads((out / "run" / "progress.json").read_text())
    spec = str(out)
    measured = next(result for result in progress["validations"] if result["step"] == progress["best"]["step"])
    parts = [f"| tau_sampled | {measured['tau_sampled']} |", f"| best at step | {measured['step']} |", "| steps | 2 |"]
    parts += ["| data | data, 3 items", "on 1 held-out", "answers of the target", "preset `eagle3`"]
    parts += ["| structure | width=10,nodes=60 |"]
    parts += [f"visspec.accelerate(model, {spec!r})", "'owner/target'"]
    for part in parts:
        assert part in card, part
    message = capsys.readouterr().err
    assert f"--drafter {spec}" in message and "2 steps see 2 of 2 items" in message and "1 validate" in message
    assert registry.drafter(spec, model_of("llava"))[0].nodes == 60
    fast = visspec.accelerate(model_of("llava"), spec)
    fast.drafter.export(data / "again", "eagle3")
    written = json.loads((data / "again" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"] and "partial_rotary_factor" not in written


def test_the_shell_exports_what_was_trained(data, capsys):
    out = train(data, "out", preset="dflash", layers=1)
    assert main(["export", str(out), "--form", "dflash", "--out", str(data / "x")]) == 0
    assert "x: dflash, a drafter for owner/target" in capsys.readouterr().out
    drafter, _ = registry.drafter(str(data / "x"), model_of("llava"))
    assert drafter.block == registry.drafter(str(out), model_of("llava"))[0].block
    (data / "bare").mkdir()
    for argv, message in (
        ([str(out), "--form", "eagle3"], "form: got 'eagle3', expected one of dflash"),
        ([str(out), "--form", "dflash", "--out", str(data / "x")], "x already holds a model. Choose another folder."),
        ([str(data / "bare"), "--form", "dflash"], "target: got none, and "),
    ):
        assert main(["export", *argv, *(() if "--out" in argv else ("--out", str(data / "y")))]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("preset, form, said", [
    (None, "eagle3", "form: got a drafter with fusion sum for 'eagle3', expected split"),
    (None, "eagle", "form: got a drafter with positions target for 'eagle', expected index"),
    ("dflash", "dspark", "form: got a drafter with no sequential head"),
])  # fmt: skip
def test_export_in_another_form_is_refused(preset, form, said, data):
    out = train(data, "own", preset=preset)
    with raises_line(said):
        drafter_export.export(out, form, data.parent / "x")


def test_drafter_without_form_refused():
    with raises_line("form: ContextDrafter has no form 'dflash'. Other engines can't read"):
        registry.drafter("context", model_of("llava"))[0].export("x", "dflash")
