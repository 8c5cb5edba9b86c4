"""Answers of the target that are kept on disk, for later trainings."""

from dataclasses import fields

import pytest
import torch

import visspec
from tests.test_train import prompts
from tests.tiny import model_of
from tests.training_processes import pictures, run_of
from visspec.api.training import drafter as train_drafter
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import EagleDrafter
from visspec.train.capture import AnsweredRequest, capture, identity
from visspec.train.store import Store

CPU = torch.device("cpu")


def own(name):
    """A request whose answers are the data's."""
    request = prompts(name)(1)
    known = {f.name: getattr(request, f.name) for f in fields(request)}
    return AnsweredRequest(**known, answers=[[5, 6, 7], [8, 2], [9]][: len(request.prompt)])


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("states", [True, False])  # what the head reads, or the distributions
@pytest.mark.parametrize("asked", [lambda name: prompts(name)(1), own])
def test_what_is_read_is_what_was_recorded(tmp_path, name, states, asked):
    drafter = EagleDrafter.for_model(model_of(name))
    target = HFDecoder(drafter.model, drafter.traits.feature_layers, embeddings=True, states=states)
    recorded = capture(target, visspec.Exact(), asked(name))
    asked_for = []

    def law():
        asked_for.append(1)
        return target.law(asked(name))

    store = Store(tmp_path / "store", {"seed": 0}, law, CPU)
    assert store.answers(7, lambda: recorded) is recorded
    for _ in range(2):
        result = store.answers(7, None)  # nothing is recorded again
        for f in fields(result):
            a, b = getattr(result, f.name), getattr(recorded, f.name)
            if isinstance(b, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), f.name
            else:
                assert f.name == "law" or a == b, f.name
        assert (result.law is identity) == (not states) and torch.equal(result.logits, recorded.logits)
    assert len(asked_for) == states
    assert {path.name for path in store.folder.iterdir()} == {"store.json", "answers-00000007.safetensors"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    for owner, name in ((train_drafter.targets, "load"), (train_drafter, "prepare")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # `run_of` sets them; this puts them back
    pictures(tmp_path / "data")
    return tmp_path


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_store_serves_later_runs(home, monkeypatch, capsys):
    run_of(home, "plain")
    run_of(home, "first", store=home / "store")
    message = capsys.readouterr().err
    files = sorted((home / "store").glob("answers-*"))
    size = files[0].stat().st_size
    assert len(files) == 4 and f"keeps {size / 2e6:.2f} MB per answer, {size * 4 / 1e9:.2f} GB for 8 answers" in message
    monkeypatch.setattr("visspec.train.loop.capture", None)  # the target is not asked again
    run_of(home, "second", store=home / "store")
    run_of(home, "other", store=home / "store", rate=2e-3)
    assert weights(home / "plain") == weights(home / "first") == weights(home / "second") != weights(home / "other")


def test_ids_are_counted_in_stored_answers(home, monkeypatch):
    run_of(home, "plain", draft_vocab=40)
    run_of(home, "first", store=home / "store", draft_vocab=40)
    monkeypatch.setattr("visspec.train.loop.capture", None)  # the target is not asked again
    run_of(home, "second", store=home / "store", draft_vocab=40)
    assert weights(home / "plain") == weights(home / "first") == weights(home / "second")


def test_bad_input_is_a_sentence(home, monkeypatch):
    refused = lambda said: pytest.raises(ValueError, match="^store: " + said)  # noqa: E731
    with refused(".*/out is the folder of the drafter"):
        run_of(home, "out", store=home / "out")
    with refused(".*/data has other content"):
        run_of(home, "out", store=home / "data")
    run_of(home, "out", store=home / "store")
    for name, value in {"seed": 1, "max_new_tokens": 9, "rows": 1}.items():
        with refused(f".*/store: got {name} {value} and records made with"):
            run_of(home, "out", store=home / "store", overwrite=True, **{name: value})
    (home / "store" / "store.json").unlink()
    with refused(".*/store has other content"):
        run_of(home, "out", store=home / "store", overwrite=True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with refused(r"0\.0 GB are needed, but only 0\.0 are free"):
        run_of(home, "out", store=home / "full", overwrite=True)
