"""Detectors for GenEval: Mask2Former with transformers, the original with mmdet; CLIP for colours.

Every class takes a loaded model and its processor. Only `MMDetMask2Former` with the original's checkpoint is
`original`: the Mask2Former of transformers was trained separately and scores differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from visspec.eval.metrics.clipscore import ClipScorer
from visspec.eval.metrics.detection import Detection, DetectionResult, digest, file_digest
from visspec.eval.metrics.features import weights_hash
from visspec.eval.metrics.geneval import COLOURS, COUNTING_THRESHOLD, THRESHOLD

if TYPE_CHECKING:
    from transformers import CLIPModel, PreTrainedModel

# COCO's 80 classes in COCO's order with GenEval's names; models are mapped by index, not by name.
COCO_CLASSES = tuple(
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,parking meter,"
    "bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,"
    "skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,"
    "cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,"
    "potted plant,bed,dining table,toilet,tv,laptop,computer mouse,tv remote,computer keyboard,cell phone,microwave,"
    "oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,hair drier,toothbrush".split(",")
)
ORIGINAL_CHECKPOINT = "743b7d99"  # first hex digits of the SHA-256, also in mmdet's file name
ORIGINAL_CLIP = "openai/clip-vit-large-patch14"
CANVAS = "#999999"


def box_of(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Return the smallest box (x0, y0, x1, y1) around a non-empty mask; x1 and y1 are exclusive."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


class _ModelDetector:
    """Device, name, fingerprint, and GenEval's thresholds, which are calibrated to its own detector."""

    original = False
    scores = (THRESHOLD, COUNTING_THRESHOLD)  # all tasks but counting, counting

    def __init__(self, model: PreTrainedModel, processor: Any, name: str):
        self.model, self.processor, self.name = model.eval(), processor, name
        self.fingerprint = digest(name, type(self).__name__, weights_hash(model), self.scores)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def threshold(self, tag: str) -> float:
        """Return the value that scores must exceed, which is different for counting."""
        return self.scores[tag == "counting"]


class Mask2Former(_ModelDetector):
    """Instance segmentation by transformers' Mask2Former, with all classes of its head. It uses the lowest threshold of
    all tasks (the processor's default of 0.5 would drop detections above 0.3) and binary maps (otherwise overlapping
    masks overwrite each other). Boxes are computed from the masks.
    """

    def __init__(self, model: PreTrainedModel, processor: Callable, name: str, classes: Sequence[str] = COCO_CLASSES):
        super().__init__(model, processor, name)
        if model.config.num_labels != len(classes):
            raise ValueError(f"the model has {model.config.num_labels} classes, but {len(classes)} names were given.")
        self.classes = tuple(classes)

    @torch.inference_mode()
    def detect(self, image: Image.Image) -> DetectionResult:
        """Return every instance above the lowest threshold, of any class."""
        inputs = self.processor(images=image, return_tensors="pt").to(self.device)
        options = {"threshold": min(self.scores), "target_sizes": [image.size[::-1]], "return_binary_maps": True}
        (result,) = self.processor.post_process_instance_segmentation(self.model(**inputs), **options)
        segments = result["segments_info"]
        if not segments:
            return DetectionResult(())
        masks = np.asarray(result["segmentation"].cpu()).astype(bool).reshape(len(segments), image.height, image.width)
        instances = [
            (self.classes[info["label_id"]], float(info["score"]), mask) for info, mask in zip(segments, masks)
        ]
        return DetectionResult(tuple(Detection(n, s, box_of(mask), mask) for n, s, mask in instances if mask.any()))


class MMDetMask2Former(_ModelDetector):
    """The original's detector: an mmdet model and its weight file, whose hash is checked. `infer(array BGR uint8)`
    returns for each class an array (n, 5) of boxes with scores and a list of masks, like `inference_detector` of mmdet
    2. Without it, `config` and `checkpoint` are loaded with mmdet.
    """

    name = "mask2former-swin-s-mmdet"

    def __init__(self, config: str | Path, checkpoint: str | Path, device: str = "cuda", infer: Callable | None = None):
        actual = file_digest(checkpoint)
        self.original = actual.startswith(ORIGINAL_CHECKPOINT)
        self.fingerprint = digest(self.name, actual)
        if infer is None:
            from mmdet.apis import inference_detector, init_detector

            model = init_detector(str(config), str(checkpoint), device=device)
            infer = lambda array: inference_detector(model, array)  # noqa: E731
        self.infer = infer

    def detect(self, image: Image.Image) -> DetectionResult:
        """Return every instance of the 80 classes."""
        boxes, masks = self.infer(np.ascontiguousarray(np.asarray(image)[..., ::-1]))
        out = []
        for label, rows, label_masks in zip(COCO_CLASSES, boxes, masks):
            for row, mask in zip(rows, label_masks):
                x0, y0, x1, y1, score = map(float, row)
                out.append(Detection(label, score, (x0, y0, x1, y1), np.asarray(mask, bool)))
        return DetectionResult(tuple(out))


class ClipColours(ClipScorer):
    """GenEval's colour classifier: compares the object, cropped to its box on grey #999, with three templates and ten
    colours. `original` if the model is OpenAI's ViT-L/14, identified by `name` and the width of its projection.
    """

    templates = (
        "a photo of a {colour} {label}",
        "a photo of a {colour}-colored {label}",
        "a photo of a {colour} object",
    )

    def __init__(self, model: CLIPModel, processor: Callable, name: str):
        super().__init__(model, processor, name)
        self.fingerprint = digest(name, weights_hash(model), self.templates)
        self.original = name == ORIGINAL_CLIP and model.config.projection_dim == 768
        self._classifiers: dict[str, torch.Tensor] = {}

    def _classifier(self, label: str) -> torch.Tensor:
        """Return unit text embeddings (10, d), averaged over templates."""
        if label not in self._classifiers:
            texts = [t.format(colour=colour, label=label) for colour in COLOURS for t in self.templates]
            rows = normalize(self.of_texts(texts).float(), dim=-1)
            means = rows.reshape(len(COLOURS), len(self.templates), -1).mean(1)
            self._classifiers[label] = normalize(means, dim=-1)
        return self._classifiers[label]

    @torch.inference_mode()
    def classify(self, image: Image.Image, detections: Sequence[Detection], label: str) -> list[str]:
        """Return the nearest of the ten colour words for each detection."""
        if not detections:
            return []
        rows = normalize(self.of_images([cut_out(image, d) for d in detections]).float(), dim=-1)
        return [COLOURS[i] for i in (rows @ self._classifier(label).T).argmax(1).tolist()]


def cut_out(image: Image.Image, detection: Detection) -> Image.Image:
    """Crop the object to its box (at least one pixel), on grey if there is a mask."""
    if detection.mask is not None:
        blank = Image.new("RGB", image.size, CANVAS)
        image = Image.composite(image, blank, Image.fromarray(detection.mask.astype(np.uint8) * 255))
    x0, y0, x1, y1 = (round(v) for v in detection.box)
    return image.crop((x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)))
