"""`visspec bench image` on a user's prompts and photographs, and the commands of docs/methods.md on LANTERN."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import test_lantern_drafters as lantern
from tests.doubles import refused
from tests.test_convert import llamagen, t5
from tests.tiny_clip import clip
from visspec.cli.main import main
from visspec.eval.metrics import named
from visspec.io.images import open_image

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
TINY = ["--extractor", "random-conv"]  # FID itself needs weights that are not here


def photographs(folder, count: int = 4):
    folder.mkdir()
    random = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(random.integers(0, 255, (24, 20, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "photos")
    (tmp_path / "coco.txt").write_text("a red cube\nblue grass\n\na cube\nred\n")
    clip(tmp_path / "openai" / "clip-vit-large-patch14")
    return tmp_path


def test_commands_of_the_page(home, monkeypatch, capsys):
    """On random weights in the published layouts, by the names that the page uses."""
    (home / "coco.txt").write_text("a red cube\nblue grass\n")
    codes = 128  # LANTERN's preset asks for 100 neighbours
    weights, *_ = llamagen(home, True, codes=codes)
    tiny_sizes = ["--size", "16", "--heads", "4"]
    (home / weights).rename(home / "t2i_XL_stage1_256.pt")
    t5(home / "google" / "flan-t5-xl")
    monkeypatch.setitem(lantern.CONFIGS["llamagen"], "caption_dim", 12)
    monkeypatch.setitem(lantern.CONFIGS["llamagen"], "vocab_size", codes)
    lantern.published("llamagen", home / "llamagen_drafter")
    (home / "llamagen_drafter" / "model.safetensors").unlink()
    text = PAGE.read_text().partition("## LANTERN beside GSD")[2]
    commands = [line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()]
    converting, comparing, others = (shlex.split(line)[1:] for line in commands)
    assert main([*converting, *tiny_sizes]) == 0
    assert main([*comparing, "--quality", "2", "--count", "1", *TINY]) == 0
    printed = capsys.readouterr().out
    record = json.loads((home / "lantern.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["plain", "lantern", "gsd"] and record["n_prompts"] == 1
    for name, row in rows.items():
        assert row["quality_n"] == 2 and row["fd_name"] == "FD[random-conv]" and name in printed
    for head in re.findall(r"^\| ([^|]+) \|", text, re.M)[2:]:
        expected = {"FID": "FD[random-conv]"}.get(head, head)
        assert all(part.strip() in " ".join(printed.split()) for part in expected.split(",")), head
    assert main([*others]) == 0
    for name in ("strict", "windows", "wide"):
        assert name in capsys.readouterr().out or name != "strict"
    for word in re.findall(r"`(visspec report [^`]+|visspec generate [^`]+)`", " ".join(text.split())):
        assert main(shlex.split(word)[1:]) == 0


def test_scores_equal_metrics(home, folder, capsys, monkeypatch):
    call = ["bench", "image", "--model", str(folder), "--prompts", "coco.txt", "--count", "4"]
    call += ["--method", "plain", "--method", "coupled", "--reference", "photos", *TINY]
    call += ["--out", "drawn", "--json", "a.json"]
    assert main(call) == 0
    rows = {row["name"]: row for row in json.loads((home / "a.json").read_text())["rows"]}
    scorer = named.clip("openai/clip-vit-large-patch14")
    for name, row in rows.items():
        assert main(["eval", "fid", f"drawn/{name}", "photos", "--json", "fid.json"]) == 0
        assert json.loads((home / "fid.json").read_text())["value"] == pytest.approx(row["fd"])
        images = [open_image(home / "drawn" / name / f"{i:05d}" / "samples" / "0000.png") for i in range(4)]
        expected = 100 * scorer.cosines(images, ["a red cube", "blue grass", "a cube", "red"]).mean()
        assert row["clipscore"] == pytest.approx(expected) and row["quality_n"] == 4
    files = {path: path.stat().st_mtime_ns for path in (home / "drawn").rglob("*.png")}
    assert len(files) == 8 and main(call) == 0, "a run goes on where it was"
    assert files == {path: path.stat().st_mtime_ns for path in (home / "drawn").rglob("*.png")}
    monkeypatch.setattr("visspec.cli.bench_image.bench", lambda *_, **__: pytest.fail("a folder is refused first"))
    assert "got seed 1" in refused(capsys, *call, "--seed", "1")
    (home / "coco.txt").write_text("a red cube\nanother\na cube\nred\n")
    assert "has the image of another prompt. Choose another folder." in refused(capsys, *call)


def test_missing_files_named_first(home, folder, capsys):
    call = ["bench", "image", "--model", str(folder), "--method", "plain"]
    (home / "few").mkdir()
    mine = [*call, "--prompts", "coco.txt"]
    for arguments, words in (
        ([*call, "--reference", "photos"], "--reference: got photos without --prompts. Pass both."),
        ([*mine, "--quality", "4"], "--quality: got 4, expected 0: --prompts are evaluated against photographs"),
        ([*mine, "--reference", "few", *TINY], "--reference: got"),
        ([*mine, "--reference", "gone", *TINY], "--reference: got gone, expected a folder of images"),
        ([*mine, "--reference", "photos"], "extractor: got 'inception', expected one that can be loaded"),
        ([*mine, "--reference", "photos", *TINY, "--clip", "gone"], "--clip: got 'gone', expected one"),
        ([*mine, "--method", "lantern"], "--method lantern: drafter: 'image-eagle:tree=dynamic' must be trained first"),
    ):
        assert words in refused(capsys, *arguments)
