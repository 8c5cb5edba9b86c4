"""CLIPScore, DPG-Bench and HPSv2 hooks with stand-in models: formulas, quirks behind compat, bad input."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny_clip
from visspec.eval.metrics import clipscore, dpg, hps


def save(path: Path, colour=(10, 20, 30), size=(8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


class ByLength:
    """Cosine = length of the text / 100; remembers what it was given."""

    name = fingerprint = "fake"
    length = 77

    def __init__(self):
        self.texts: list[str] = []

    def cosines(self, images, texts):
        assert len(images) == len(texts) and all(image.mode == "RGB" for image in images)
        self.texts += texts
        return np.array([len(text) / 100 for text in texts])


# --- CLIPScore ---


def test_pairs_by_name_and_lists_what_has_no_partner(tmp_path: Path):
    for name in ("1.png", "2.png", "10.png"):
        save(tmp_path / name)
    save(tmp_path / "bad.png").write_bytes(b"x")
    captions = {"10.png": "c" * 30, "2.png": "b" * 20, "bad.png": "z", "lost.png": "y"}
    out = clipscore.from_folder(tmp_path, captions, ByLength())
    assert out["value"] == pytest.approx(25) and out["n"] == 2 and out["name"] == "CLIPScore[fake]"
    text = "\n".join(out["problems"])
    assert "1.png has no caption" in text and "no image lost.png" in text and "bad.png" in text
    assert (out["scale"], out["prefix"], out["text_length"]) == (100.0, "", 77)
    with pytest.raises(ValueError, match="has a caption"):
        clipscore.from_folder(tmp_path, {"x.png": "a"}, ByLength())


def test_dialects_differ_as_published(tmp_path: Path):
    save(tmp_path / "a.png")
    values = {}
    for name, dialect in clipscore.PRESETS.items():
        scorer = ByLength()
        values[name] = clipscore.from_folder(tmp_path, {"a.png": "dog"}, scorer, dialect)["value"]
        assert scorer.texts == [("A photo depicts " if name != "torchmetrics" else "") + "dog"]
    assert values == pytest.approx({"torchmetrics": 3.0, "paper": 2.5 * 0.19, "lantern": 0.19})
    negative = np.array([-0.5, 0.5])
    assert clipscore.scores(negative, clipscore.PRESETS["paper"]).tolist() == [0, 1.25]
    assert clipscore.scores(negative, clipscore.PRESETS["lantern"]).tolist() == [-0.5, 0.5]


def test_clip_scorer_is_the_cosine_of_a_tiny_model(tmp_path: Path):
    """Of texts cut to the model's length, which the second is longer than."""
    model, processor = tiny_clip.clip(tmp_path)
    scorer = clipscore.ClipScorer(model, processor, "tiny")
    images, texts = [Image.new("RGB", (40, 50), c) for c in ("red", "blue")], ["hello", "world " * 20]
    got = scorer.cosines(images, texts)
    with torch.no_grad():
        u = model.get_image_features(**processor(images=images, return_tensors="pt")).pooler_output
        cut = {"return_tensors": "pt", "truncation": True, "max_length": tiny_clip.LENGTH}
        v = [model.get_text_features(**processor(text=text, **cut)).pooler_output[0] for text in texts]
    expected = [float(a @ b / a.norm() / b.norm()) for a, b in zip(u, v)]
    assert got == pytest.approx(expected, abs=1e-5) and abs(got[0] - got[1]) > 1e-4
    with pytest.raises(ValueError, match="different counts: 2 images and 1 texts"):
        scorer.cosines(images, ["a"])


# --- DPG-Bench ---


def bench(path: Path) -> Path:
    """Item `a`: 1 <- 2 <- 3 and 4 alone; item `b`: 1 alone."""
    rows = [("a", 1, 0, "entity"), ("a", 2, 1, "attribute"), ("a", 3, 2, "relation"), ("a", 4, 0, "entity")]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = "item_id text keywords proposition_id dependency category_broad category_detailed tuple"
        writer.writerow([*names.split(), "question_natural_language", "unknown_column"])
        for item, number, parents, kind in [*rows, ("b", 1, 0, "global")]:
            asked = f"{kind} - x (y)", f"{item}{number}?"
            writer.writerow([item, f"<i>{item}</i>", "", number, parents, kind, "x", *asked, "?"])
    return path


def test_failures_are_inherited_and_the_mean_is_over_items(tmp_path: Path):
    items = dpg.read_items(bench(tmp_path / "d.csv"))
    assert [(i.id, len(i.questions)) for i in items] == [("a", 4), ("b", 1)] and items[0].questions[2].parents == (2,)
    for name in "ab":
        save(tmp_path / "im" / f"{name}.png")
    answer = lambda image, question: "no" if question == "a1?" else "yes"  # noqa: E731
    out = dpg.evaluate(items, tmp_path / "im", answer, "fake")
    assert out["value"] == pytest.approx(100 * (1 / 4 + 1) / 2) and out["name"] == "DPG-Bench[fake]"
    assert out["categories"] == {"attribute": 0, "entity": 50, "global": 100, "relation": 0}
    loose = dpg.evaluate(items, tmp_path / "im", answer, "fake", compat=True)
    assert loose["value"] == out["value"] and loose["categories"]["relation"] == 100  # not propagated
    wordy = lambda image, question: "Yes."  # noqa: E731
    assert dpg.evaluate(items, tmp_path / "im", wordy, "fake")["value"] == 100
    assert dpg.evaluate(items, tmp_path / "im", wordy, "fake", compat=True)["value"] == 0


def test_grids_are_cut_and_compat_categories_see_the_last_crop_only(tmp_path: Path):
    items = dpg.read_items(bench(tmp_path / "d.csv"))[1:]
    grid = Image.new("RGB", (16, 16))
    for i, colour in enumerate([(255, 0, 0), (0, 0, 0), (255, 0, 0), (255, 0, 0)]):
        grid.paste(colour, (8 * (i % 2), 8 * (i // 2), 8 * (i % 2) + 8, 8 * (i // 2) + 8))
    (tmp_path / "im").mkdir()
    grid.save(tmp_path / "im" / "b.png")

    def answer(image, question):
        assert image.size == (8, 8)
        return "yes" if image.getpixel((4, 4))[0] == 255 else "no"

    out = dpg.evaluate(items, tmp_path / "im", answer, "fake", resolution=8)
    assert out["value"] == 75 and out["categories"]["global"] == 75
    loose = dpg.evaluate(items, tmp_path / "im", answer, "fake", resolution=8, compat=True)
    assert loose["value"] == 75 and loose["categories"]["global"] == 100
    with pytest.raises(ValueError, match="5 or 10 pixels a side"):
        dpg.evaluate(items, tmp_path / "im", answer, "fake", resolution=5)


def test_missing_images_score_zero_and_the_lost_first_row_is_compat_only(tmp_path: Path):
    path = bench(tmp_path / "d.csv")
    save(tmp_path / "im" / "b.png")
    yes = lambda image, question: "yes"  # noqa: E731
    out = dpg.evaluate(dpg.read_items(path), tmp_path / "im", yes, "fake")
    assert out["value"] == 50 and out["n"] == 2 and out["problems"][0].startswith("a: there is no image file")
    save(tmp_path / "im" / "a.png")
    lost = dpg.read_items(path, compat=True)
    assert len(lost[0].questions) == 3
    out = dpg.evaluate(lost, tmp_path / "im", yes, "fake", compat=True)
    assert out["n"] == 1 and out["problems"] == ["a: the parent question 1 is not asked"]
    (tmp_path / "bad.csv").write_text("item_id,text\na,b\n")
    with pytest.raises(ValueError, match=r"line 2 of .*bad\.csv is no DPG-Bench row"):
        dpg.read_items(tmp_path / "bad.csv")
    with pytest.raises(ValueError, match="no image of"):
        dpg.evaluate(dpg.read_items(path), tmp_path / "none", yes, "fake")


# --- HPSv2 ---


def test_hps_averages_groups_then_styles(tmp_path: Path):
    prompts = {"anime": ["x" * (1 + i // 80) for i in range(100)], "photo": ["xxxxx"] * 3}
    for style, texts in prompts.items():
        for i in range(len(texts)):
            save(tmp_path / style / f"{i:05d}.jpg")
    out = hps.evaluate(tmp_path, prompts, ByLength().cosines, "v2.1")
    # anime: a group of 80 at 1 and one of 20 at 2, means not weighted by size.
    assert out["styles"]["anime"] == pytest.approx({"value": 1.5, "spread": 0.5, "n": 100})
    assert out["value"] == pytest.approx((1.5 + 5) / 2) and out["name"] == "HPS v2.1" and out["problems"] == []
    (tmp_path / "photo" / "00001.jpg").write_bytes(b"broken")
    (tmp_path / "photo" / "00002.jpg").rename(tmp_path / "photo" / "00002.png")
    out = hps.evaluate(tmp_path, prompts, ByLength().cosines, "v2.1")
    assert out["styles"]["photo"]["n"] == 2 and len(out["problems"]) == 1 and "00001.jpg" in out["problems"][0]
    with pytest.raises(ValueError, match="not comparable"):
        hps.evaluate(tmp_path, prompts, ByLength().cosines, "2.1")
