"""Extractors, detectors and CLIP models by name: an included one, a folder or a hub id.

Only safetensors are loaded, and no remote code. Raises ValueError with the argument's name if a model can't be loaded.
"""

from collections.abc import Callable
from typing import Any

from visspec.eval.metrics import clipscore, detection, detectors, features
from visspec.io import included


def extractor(spec: str, device: str = "cpu") -> features.FeatureExtractor:
    """Load "random-conv" (included), "inception[:FILE]", or a transformers model with an image processor."""
    kind, _, rest = spec.partition(":")
    if spec == "random-conv":
        return features.RandomConv(device)
    if kind == "inception":
        return _build_metric("extractor", spec, lambda: features.Inception(rest or None, device))
    model, processor = _transformers("extractor", spec, "AutoModel", "AutoImageProcessor", device)
    return features.TransformersFeatures(model, processor, spec)


def clip(spec: str, device: str = "cpu", argument: str = "model") -> clipscore.ClipScorer:
    """Load a CLIP model of transformers with its processor. Errors name `argument`."""
    model, processor = _transformers(argument, spec, "CLIPModel", "CLIPProcessor", device)
    return clipscore.ClipScorer(model, processor, spec)


def detector(spec: str, device: str = "cpu") -> detection.Detector:
    """Load an included detector by name, "mask2former:MODEL" or "mmdet:CONFIG:CHECKPOINT" (GenEval's own)."""
    kind, _, rest = spec.partition(":")
    own = included.table().worlds
    if spec in own:
        return own[spec].detector()
    if kind == "mmdet":
        config, _, weights = rest.partition(":")
        return _build_metric("detector", spec, lambda: detectors.MMDetMask2Former(config, weights, device))
    if kind != "mask2former" or not rest:
        names = ", ".join([*own, "mask2former:MODEL"])
        raise ValueError(f"detector: got {spec!r}, expected {names} or mmdet:CONFIG:CHECKPOINT.")
    loaded = _transformers("detector", rest, "AutoModelForUniversalSegmentation", "AutoProcessor", device)
    return detectors.Mask2Former(*loaded, rest)


def colours(spec: str, device: str = "cpu") -> detection.ColourClassifier:
    """Return the colour classifier "detected" (measured by the detector), or load a CLIP model."""
    if spec == "detected":
        return detection.DetectedColours()
    return detectors.ClipColours(*_transformers("colours", spec, "CLIPModel", "CLIPProcessor", device), spec)


def _transformers(argument: str, spec: str, model: str, processor: str, device: str) -> tuple[Any, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()

    def load() -> tuple[Any, Any]:
        local = {"local_files_only": included.check_model(spec)}
        loaded = getattr(transformers, model).from_pretrained(spec, use_safetensors=True, **local)
        return loaded.to(device).eval(), getattr(transformers, processor).from_pretrained(spec, **local)

    return _build_metric(argument, spec, load)


def _build_metric(argument: str, spec: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # hubs, files, formats and missing packages raise different types
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{argument}: got {spec!r}, expected one that can be loaded ({message}).") from None
