"""`visspec eval`: every metric on folders and files, resumed, and bad input in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import tiny_clip
from tests.doubles import refused
from visspec.cli.main import main
from visspec.eval.metrics import geneval
from visspec.io import included


def pictures(folder: Path, count: int, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measured(tmp_path: Path, *arguments: object, code: int = 0) -> dict:
    out = tmp_path / "result.json"
    assert main(["eval", *map(str, arguments), "--json", str(out)]) == code
    row = json.loads(out.read_text())
    assert {"metric", "value", "n", "provenance"} <= set(row) and row["provenance"]["torch"]
    return row


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    tiny_clip.clip(folder := tmp_path_factory.mktemp("clip"))
    return folder


def test_two_folders(tmp_path):
    a, b = pictures(tmp_path / "a", 12), pictures(tmp_path / "b", 12, seed=1)
    result = measured(tmp_path, "fid", a, b, "--cache", tmp_path / "cache")
    assert result["metric"] == "FD[random-conv]" and result["n"] == result["n_reference"] == 12 and result["value"] > 0
    assert measured(tmp_path, "fid", a, b, "--cache", tmp_path / "cache")["value"] == result["value"]
    assert measured(tmp_path, "fid", a, a)["value"] == pytest.approx(0, abs=1e-6)
    kid = measured(tmp_path, "kid", a, b, "--subsets", 3, "--subset-size", 6)
    assert kid["metric"] == "KID[random-conv]" and kid["subset_size"] == 6


def test_eval_broken_file(tmp_path, capsys):
    a, b = pictures(tmp_path / "a", 6), pictures(tmp_path / "b", 5)
    (a / "9.png").write_bytes(b"broken")
    result = measured(tmp_path, "fid", a, b, code=1)
    assert result["n"] == 6 and any("9.png" in p for p in result["problems"]) and "9.png" in capsys.readouterr().err


def test_another_extractor_names_the_metric(tmp_path, clip):
    a = pictures(tmp_path / "a", 5)
    result = measured(tmp_path, "fid", a, a, "--extractor", clip)
    assert result["metric"] == f"FD[{clip}]" and result["value"] == pytest.approx(0, abs=1e-3)


def test_clipscore_of_a_flat_folder_resumes(tmp_path, clip, monkeypatch):
    folder = pictures(tmp_path / "a", 4)
    prompts = lines(tmp_path / "p.jsonl", [{"image": f"{i}.png", "prompt": "a dog"} for i in range(4)])
    first = measured(tmp_path, "clipscore", folder, "--prompts", prompts, "--model", clip)
    assert first["metric"] == f"CLIPScore[{clip}]" and first["n"] == 4
    assert (tmp_path / "a.clipscore.jsonl").read_text().count("\n") == 4
    monkeypatch.setattr("visspec.eval.metrics.clipscore.ClipScorer.cosines", lambda *a: pytest.fail("scored again"))
    again = measured(tmp_path, "clipscore", folder, "--prompts", prompts, "--model", clip)
    assert again["value"] == first["value"]


def drawn(prompt: dict, seed: int) -> Image.Image:
    return Image.fromarray(included.scenes("shapes").render(prompt, np.random.default_rng(seed), 96))


def test_geneval_in_its_layout_and_flat(tmp_path):
    prompts = included.scenes("shapes").prompts()[:3]
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, prompt in enumerate(prompts):
        picture = drawn(prompt, i)
        picture.save(geneval.write_prompt(tmp_path / "g", i, prompt) / "0000.png")
        picture.save(flat / f"{i}.png")
    own = measured(tmp_path, "geneval", tmp_path / "g")
    assert own["metric"] == "GenEval[shapes]" and own["value"] == 1 and own["n"] == 3
    texts = lines(tmp_path / "t.jsonl", [{"image": f"{i}.png", "prompt": p["prompt"]} for i, p in enumerate(prompts)])
    assert measured(tmp_path, "geneval", flat, "--prompts", texts)["value"] == 1
    full = lines(tmp_path / "f.jsonl", [{"image": f"{i}.png", **p} for i, p in enumerate(prompts)])
    assert measured(tmp_path, "geneval", flat, "--prompts", full, "--results", tmp_path / "r.jsonl")["n"] == 3
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 3


def test_bad_input_is_one_sentence(tmp_path, capsys, clip):
    a, three = pictures(tmp_path / "a", 5), pictures(tmp_path / "three", 3)
    (tmp_path / "empty").mkdir()
    unreadable = pictures(tmp_path / "bad", 4)
    for path in unreadable.iterdir():
        path.write_bytes(b"no image")
    assert "reference" in refused(capsys, "eval", "fid", a, tmp_path / "empty")
    assert "of 3 images, expected at least 4" in refused(capsys, "eval", "fid", a, three)
    assert "generated: got" in refused(capsys, "eval", "fid", tmp_path / "none", a)
    assert "no image" in refused(capsys, "eval", "fid", unreadable, a)
    assert "extractor: got 'nothing'" in refused(capsys, "eval", "fid", a, a, "--extractor", "nothing")
    assert "detector: got 'eyes'" in refused(capsys, "eval", "geneval", a, "--detector", "eyes")
    other = lines(tmp_path / "other.jsonl", [{"image": "z.png", "prompt": "a photo of a circle"}])
    assert "none of the 1 images" in refused(capsys, "eval", "geneval", a, "--prompts", other)
    strange = lines(tmp_path / "s.jsonl", [{"image": "0.png", "prompt": "an astronaut"}])
    assert "--prompts" in refused(capsys, "eval", "geneval", a, "--prompts", strange)
    assert "no image of" in refused(capsys, "eval", "clipscore", a, "--prompts", other, "--model", clip)
    (tmp_path / "half.json").write_text("{")
    assert "--prompts: got" in refused(
        capsys, "eval", "clipscore", a, "--prompts", tmp_path / "half.json", "--model", clip
    )
