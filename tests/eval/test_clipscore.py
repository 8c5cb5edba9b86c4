"""CLIPScore with stand-in models: pairs of images and captions, the cosine, bad input."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny_clip
from visspec.eval.metrics import clipscore


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


def test_pairs_by_name(tmp_path: Path):
    for name in ("1.png", "2.png", "10.png"):
        save(tmp_path / name)
    save(tmp_path / "bad.png").write_bytes(b"x")
    captions = {"10.png": "c" * 30, "2.png": "b" * 20, "bad.png": "z", "lost.png": "y"}
    out = clipscore.from_folder(tmp_path, captions, ByLength(), tmp_path / "r.jsonl")
    assert out["value"] == pytest.approx(25) and out["n"] == 2 and out["name"] == "CLIPScore[fake]"
    text = "\n".join(out["problems"])
    assert "1.png has no caption" in text and "no image lost.png" in text and "bad.png" in text
    assert out["text_length"] == 77
    with pytest.raises(ValueError, match="has a caption"):
        clipscore.from_folder(tmp_path, {"x.png": "a"}, ByLength(), tmp_path / "r.jsonl")


def test_clip_scorer_is_cosine(tmp_path: Path):
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
