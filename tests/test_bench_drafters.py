"""`visspec bench drafters`: a row for every drafter, with what its checkpoint says of it."""

import json

import pytest

from tests.test_cli import refused
from visspec.api import presets, zoo
from visspec.cli.bench_drafters import about, parse_drafters
from visspec.cli.main import main


@pytest.mark.parametrize("timed", [True, False])
def test_it_writes_what_it_counted(tmp_path, capsys, timed):
    out, folder, images = tmp_path / "d.json", zoo.CHECKPOINTS / "captioner-vispec", 1 if timed else 2
    argv = ["bench", "drafters", "short=vispec", f"path={folder}:width=3,nodes=6", "lookup=ngram"]
    assert main([*argv, "--images", str(images), "--json", str(out), *([] if timed else ["--untimed"])]) in (0, None)
    found = json.loads(out.read_text())
    short, path, lookup = found["rows"]
    assert [row["name"] for row in found["rows"]] == ["short", "path", "lookup"] and not found["failures"]
    for row in found["rows"]:
        assert row["identical"] == row["compared"] == images and row["guarantee"] == "exact"
        assert row["tau_without_bonus"] == pytest.approx(row["tau"] - 1) and row["tau"] >= 1
        assert len(row["acceptance_by_depth"]) == len(row["reached_by_depth"])
        assert ("speedup" in row) == ("draft_over_plain" in row) == timed
    for row in (short, path):  # every pass was over a draft
        assert row["reached_by_depth"][0] == round(images * (row["nfe"] - 1))
    assert short["tau"] > 4 > lookup["tau"] and short["levels"] == 20
    assert short["parameters"] == path["parameters"] and 5e5 < short["parameters"] < 9e5 and short["training_s"] > 60
    assert lookup["parameters"] is lookup["training_s"] is lookup["sees_image"] is None
    assert "tau at the whole depth" in " ".join(capsys.readouterr().out.split())


def test_what_a_preset_sees_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "provenance.json").write_text(json.dumps({"preset": "msd", "training": {"seconds": 7.5}}))
    source = zoo.CHECKPOINTS / "captioner-vispec" / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(source.read_bytes())
    found = about(f"{tmp_path}:width=3")
    assert found["sees_image"] == presets.TRAINED["msd"].sees and found["training_s"] == 7.5


@pytest.mark.parametrize("given,why", [("vispec", "has no name"), ("=x", "has no name"), ("a=", "has no name")])
def test_drafters_without_a_name(capsys, given, why):
    assert f"drafters: '{given}' {why}, expected NAME=DRAFTER" in refused(capsys, "bench", "drafters", given)


def test_a_name_comes_once():
    assert parse_drafters(["a=x", "b=y:k=1"]) == {"a": "x", "b": "y:k=1"}
    with pytest.raises(ValueError, match="'a=y' comes twice"):
        parse_drafters(["a=x", "a=y"])
