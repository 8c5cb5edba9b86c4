"""`visspec tune`: the choice is measured on images that nobody has met, the preset, and what is refused."""

import json

import pytest

import visspec
from tests import tiny_images
from tests.doubles import refused
from tests.tiny import model_of
from visspec import presets
from visspec.cli import tune as command
from visspec.cli.main import main


def test_preset_of_tune(tmp_path):
    path, model = tmp_path / "p.json", model_of("llama")
    choice = {"drafter": "ngram:nodes=2", "acceptance": "typical:epsilon=0.2", "levels": 3}
    presets.write_preset(path, model, choice, measured_speedup=1.5)
    made = visspec.accelerate(model, preset=path)
    assert made.name == "ngram" and made.length_policy.levels == 3 and made.rule.traits.guarantee == "approximate"
    assert visspec.accelerate(model, preset=str(path), levels=5).length_policy.levels == 5
    presets.write_preset(path, model, {"drafter": "none", "acceptance": "exact", "levels": 0})
    assert visspec.accelerate(model, preset=path).drafter is None
    other = model_of("qwen2")
    with pytest.raises(ValueError, match="is made for a model with model_type 'llama', got 'qwen2'"):
        visspec.accelerate(other, preset=path)
    path.write_text(json.dumps({"drafter": "ngram"}))
    with pytest.raises(ValueError, match="has no acceptance, expected a file"):
        visspec.accelerate(model, preset=path)


KEPT = ("drafter", "acceptance", "levels")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    home = tmp_path_factory.mktemp("images")
    tiny_images.scene_files(home, 8)
    (home / "00.png").write_bytes(b"broken")
    return home


def tuned(images, *more):
    return ["tune", "--model", "captioner", "--images", str(images), *map(str, more)]


def test_a_model_and_images_are_tuned(images, tmp_path, capsys):
    record, preset = tmp_path / "t.json", tmp_path / "p.json"
    few = ["--count", 2, "--lengths", 2, 6, "--batches", 2, "--drafters", "vispec", "--max-new-tokens", 10]
    assert main(tuned(images, *few, "--json", record, "--out", preset)) == 0
    result = json.loads(record.read_text())
    rows, choice = result["rows"], result["choice"]
    assert [(r["drafter"], r["levels"], r["batch_size"]) for r in rows] == [
        ("none", 0, 2), ("vispec", 2, 2), ("vispec", 6, 2), ("vispec:width=4", 2, 2), ("vispec:width=4", 6, 2),
    ]  # fmt: skip
    assert all(r["identical"] == r["compared"] for r in rows)
    assert rows[0]["predicted_speedup"] == 1.0 == rows[0]["tau"] < rows[2]["tau"]
    measured = [row for row in rows if "measured_speedup" in row]
    assert 1 <= len([row for row in measured if row["levels"]]) <= command.FINALISTS or not result["pays"]
    (chosen,) = [row for row in measured if all(row[name] == choice[name] for name in choice)]
    assert {name: chosen[name] for name in command.FIGURES} == {name: result[name] for name in command.FIGURES}
    best = max(measured, key=lambda row: row["measured_images_per_second"])
    assert chosen == best or (best["levels"] and best["measured_speedup"] < command.PAYS)
    read = json.loads(preset.read_text())
    assert {name: read[name] for name in KEPT} == {name: choice[name] for name in KEPT}
    message = capsys.readouterr()
    assert ("choice: " in message.out) == result["pays"] != (
        "plain decoding is the fastest" in message.out
    ) and "00.png" in message.err
    assert main(["caption", str(images / "0.png"), "--preset", str(preset), "--max-new-tokens", "4"]) == 0


def test_measured_on_new_pictures(images, tmp_path, monkeypatch):
    """Also to a drafter that remembers the answers of earlier requests."""
    seen, call = [], command.CaptionArm.__call__

    def watched(arm, prompt):
        seen.extend((id(arm.fast), pixels.numpy().tobytes()) for pixels in prompt[1]["pixel_values"])
        kept.append(arm.fast)  # or its id may be given to another
        return call(arm, prompt)

    kept = []
    monkeypatch.setattr(command.CaptionArm, "__call__", watched)
    monkeypatch.setattr(command, "PAYS", 0.0)
    few = ["--count", 4, "--lengths", 2, "--batches", 3, "--max-new-tokens", 9]
    assert main(tuned(images, *few, "--drafters", "context:shared=false")) == 0
    assert len(seen) == len(set(seen)) == 2 * (2 * 6), "two rows, two halves: a batch to warm up, and one to measure"


def test_bad_input_is_a_sentence(images, tmp_path, capsys):
    message = f"got 8 that can be read, expected 10 or more in {images}"
    assert message in refused(capsys, *tuned(images, "--batches", 5))
    (tmp_path / "nowhere").mkdir()
    assert f"{tmp_path / 'nowhere'}" in refused(capsys, *tuned(tmp_path / "nowhere"))
    assert "got no such file" in refused(capsys, *tuned(tmp_path / "x.jsonl"))
    assert "drafter: got 'nothing'" in refused(capsys, *tuned(images, "--drafters", "nothing"))
    assert "is a folder, expected a file" in refused(capsys, *tuned(images, "--out", tmp_path))


def test_an_image_model_is_tuned(folder, tmp_path, capsys, monkeypatch):
    """The choice is a measured way, other prompts decide about it, and the pipeline and the bench take it."""
    monkeypatch.setattr(command, "EXACT", ["jacobi:window=4/exact", "jacobi:redraw=maximal,window=4/rejection"])
    (tmp_path / "p.txt").write_text("a photo of a red ring\na photo of a blue star\n")
    file, record = tmp_path / "tuned.json", tmp_path / "r.json"
    argv = ["tune", "--model", str(folder), "--prompts", str(tmp_path / "p.txt"), "--out", str(file)]
    assert main([*argv, "--count", "1", "--json", str(record)]) == 0
    result = json.loads(record.read_text())
    assert [row["name"] for row in result["rows"]] == ["plain", *command.EXACT] and result["n_checked"] == 1
    best = max(result["rows"][1:], key=lambda row: row["measured_speedup"])
    pays = best["measured_speedup"] >= command.PAYS
    chosen = "/".join(result["choice"][part] for part in ("drafter", "acceptance"))  # of any order, "raster" is a third
    assert result["pays"] == pays and chosen == (best["name"] if pays else "none/exact")
    assert result["predicted_speedup"] == (best["over_plain"] if pays else 1.0)
    assert ("plain decoding is the fastest" not in capsys.readouterr().out) == pays
    file.write_text(file.read_text().replace(json.dumps(result["choice"]["drafter"]), '"jacobi:window=3"'))
    pipe = visspec.ImagePipeline.from_pretrained(folder, preset=file)
    assert (pipe.drafter, pipe.acceptance) == ("jacobi:window=3", result["choice"]["acceptance"])
    own = visspec.ImagePipeline.from_pretrained(folder, drafter="none", acceptance="coupled", preset=file)
    assert (own.drafter, own.acceptance) == ("none", "coupled")
    bench = ["bench", "image", "--model", str(folder), "--method", str(file), "--count", "1"]
    assert "--prompts: got none for" in refused(capsys, *bench)
    bench += ["--world", "shapes"]
    assert main([*bench, "--method", "naive=none/exact", "--json", str(record)]) == 0
    assert [row["name"] for row in json.loads(record.read_text())["rows"]] == ["plain", "tuned", "naive"]
    assert "expected 4 or more (--count)" in refused(capsys, *argv, "--count", "2")
