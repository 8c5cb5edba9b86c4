"""Detectors and CLIP on tiny random configurations: shapes of answers, traps, fingerprints; no download."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny_clip
from visspec.eval.metrics.detection import Detection
from visspec.eval.metrics.detectors import (
    ClipColours,
    Mask2Former,
    MMDetMask2Former,
    cut_out,
)

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8))


# --- Mask2Former ---


class FakeSegmenter(torch.nn.Module):
    """Two overlapping masks of classes 16 (dog) and 64 (computer mouse), scores about 0.4 and 0.9."""

    def __init__(self):
        super().__init__()
        from types import SimpleNamespace

        self.config = SimpleNamespace(num_labels=80)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, **inputs):
        from transformers.models.mask2former.modeling_mask2former import Mask2FormerForUniversalSegmentationOutput

        classes = torch.full((1, 2, 81), -20.0)
        classes[0, 0, 16], classes[0, 0, 80] = 0.0, float(np.log(1.5))  # softmax 0.4
        classes[0, 1, 64], classes[0, 1, 80] = 0.0, float(np.log(1 / 9))  # softmax 0.9
        masks = torch.full((1, 2, 48, 48), -20.0)
        masks[0, 0, 8:24, 8:24] = 20.0
        masks[0, 1, 16:40, 16:40] = 20.0
        return Mask2FormerForUniversalSegmentationOutput(class_queries_logits=classes, masks_queries_logits=masks)


def test_mask2former_masks_and_scores():
    from transformers import Mask2FormerImageProcessor

    detector = Mask2Former(FakeSegmenter(), Mask2FormerImageProcessor(size={"height": 48, "width": 48}), "fake")
    result = detector.detect(Image.new("RGB", (96, 96)))
    by_label = {d.label: d for d in result.detections}
    assert set(by_label) == {"dog", "computer mouse"}  # 0.4 is under the processor's default; COCO says "mouse"
    assert by_label["dog"].score == pytest.approx(0.4, abs=0.01)
    assert by_label["dog"].box == pytest.approx((16, 16, 48, 48), abs=1.01)
    assert by_label["computer mouse"].box == pytest.approx((32, 32, 80, 80), abs=1.01)
    assert by_label["dog"].mask[40, 40] and by_label["computer mouse"].mask[40, 40]  # neither overwrote the other
    assert detector.threshold("counting") == 0.9 and detector.threshold("colors") == 0.3
    assert not detector.original
    with pytest.raises(ValueError, match="80 classes, but 2 names"):
        Mask2Former(FakeSegmenter(), None, "fake", ["a", "b"])


# --- the original ---


def test_mmdet_hash_and_channels(tmp_path: Path):
    (tmp_path / "w.pth").write_bytes(b"not the original")
    seen = []

    def infer(array):
        seen.append(array)
        boxes = [np.zeros((0, 5)) for _ in range(80)]
        masks: list[list] = [[] for _ in range(80)]
        boxes[16] = np.array([[1, 2, 30, 40, 0.8], [3, 3, 9, 9, 0.2]])
        masks[16] = [np.ones((48, 80), bool)] * 2
        return boxes, masks

    detector = MMDetMask2Former("config.py", tmp_path / "w.pth", infer=infer)
    assert not detector.original
    result = detector.detect(IMAGE)
    assert [(d.label, d.score) for d in result.detections] == [("dog", 0.8), ("dog", 0.2)]
    assert np.array_equal(seen[0][..., 0], np.asarray(IMAGE)[..., 2])


# --- colours ---


def test_clip_colours(tmp_path: Path):
    model, processor = tiny_clip.clip(tmp_path)
    colours = ClipColours(model, processor, "tiny")
    detections = [Detection("dog", 0.9, (0, 0, 30, 30)), Detection("dog", 0.8, (30, 10, 80, 48))]
    answer = colours.classify(IMAGE, detections, "dog")
    assert len(answer) == 2 and colours.classify(IMAGE, [], "dog") == []
    # By hand: cosine with the mean of the three unit text embeddings of each colour.
    from visspec.eval.metrics.geneval import COLOURS

    with torch.no_grad():
        pixels = processor(images=cut_out(IMAGE, detections[0]), return_tensors="pt")["pixel_values"]
        u = model.get_image_features(pixel_values=pixels).pooler_output[0]
        scores = []
        for c in COLOURS:
            texts = [f"a photo of a {c} dog", f"a photo of a {c}-colored dog", f"a photo of a {c} object"]
            rows = [model.get_text_features(**processor(text=t, return_tensors="pt")).pooler_output[0] for t in texts]
            mean = sum(r / r.norm() for r in rows)
            scores.append(float(u @ (mean / mean.norm())))
    assert answer[0] == COLOURS[int(np.argmax(scores))]
    assert not colours.original
    assert not ClipColours(model, processor, "openai/clip-vit-large-patch14").original  # the width gives it away
