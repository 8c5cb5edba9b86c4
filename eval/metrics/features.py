"""Feature extractors with a common protocol, and a fixed random convolution that needs no download.

An extractor maps uint8 images (n, 3, h, w) to features (n, d). Preprocessing is part of the metric, so it is described
in `preprocessing` and included in `fingerprint`, with a hash of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from visspec.eval.metrics.detection import digest, file_digest, with_progress
from visspec.io.files import atomic_write
from visspec.io.images import image_files, iter_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INCEPTION_SHA256 = "6726825d"  # first hex digits, also in torch-fidelity's file name
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"


class FeatureExtractor(Protocol):
    """Maps images to features. Only features with the same `fingerprint` can be compared."""

    name: str
    fingerprint: str
    preprocessing: str

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Map uint8 (n, 3, h, w) to floating (n, dim)."""


def metric_name(extractor: FeatureExtractor, verified: str = "FID", other: str = "FD") -> str:
    """Return `verified` for the Inception weights with the checked hash, else `other[name]`."""
    genuine = isinstance(extractor, Inception) and extractor.verified
    return verified if genuine else f"{other}[{extractor.name}]"


def weights_hash(module: torch.nn.Module) -> str:
    """Return a hash of every parameter and buffer of a module, including names."""
    h = sha256()
    for name, value in sorted(module.state_dict().items()):
        h.update(name.encode())
        h.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def _checked(images: torch.Tensor) -> torch.Tensor:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images must be uint8 (n, 3, h, w), not {images.dtype} {tuple(images.shape)}.")
    return images


class RandomConv:
    """Four fixed random 3x3 convolutions with stride 2 and ReLU; mean and standard deviation over space, 256 values.
    The weights are from numpy's legacy RandomState, whose stream is stable, and their hash is checked.
    """

    name = "random-conv"
    preprocessing = "uint8 / 127.5 - 1, native size"
    channels = (3, 24, 48, 96, 128)
    weights_sha256 = "645c61d634168d3a"

    def __init__(self, device: str | torch.device = "cpu"):
        rng, h, self.weights = np.random.RandomState(20151205), sha256(), []
        for fan_in, fan_out in zip(self.channels, self.channels[1:]):
            values = rng.standard_normal((fan_out, fan_in, 3, 3)) * (2 / (9 * fan_in)) ** 0.5
            values = np.ascontiguousarray(values, dtype="<f4")
            h.update(values.tobytes())
            self.weights.append(torch.from_numpy(values).to(device))
        actual = h.hexdigest()[:16]
        if actual != self.weights_sha256:
            raise RuntimeError(f"random-conv weights have hash {actual}, expected {self.weights_sha256}.")
        self.device = torch.device(device)
        self.fingerprint = digest(self.name, actual, self.preprocessing)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        x = _checked(images).to(self.device).float() / 127.5 - 1
        if min(x.shape[2:]) < 16:
            raise ValueError(f"images must be at least 16 x 16 pixels, not {x.shape[2]} x {x.shape[3]}.")
        for weight in self.weights:
            x = torch.nn.functional.conv2d(x, weight, stride=2, padding=1).relu_()
        std, mean = torch.std_mean(x, dim=(2, 3), correction=0)
        return torch.cat([mean, std], dim=1).cpu()


def pixels(model: PreTrainedModel, processor: Callable, images: Iterable[Any]) -> torch.Tensor:
    """Preprocess images with a transformers processor, on the model's device and in its dtype."""
    return processor(images=list(images), return_tensors="pt")["pixel_values"].to(model.device, model.dtype)


class TransformersFeatures:
    """Image embeddings of a transformers model (CLIP's projection, DINOv2's class token) with its own processor."""

    def __init__(self, model: PreTrainedModel, processor: Callable, name: str):
        self.model, self.processor, self.name = model.eval(), processor, name
        self.preprocessing = f"transformers {type(processor).__name__} {_settings(processor)}"
        self.fingerprint = digest(name, weights_hash(model), self.preprocessing)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        encode = getattr(self.model, "get_image_features", self.model)
        out = encode(pixel_values=pixels(self.model, self.processor, _checked(images)))
        features = out.pooler_output if out.pooler_output is not None else out.last_hidden_state[:, 0]
        return features.float().cpu()


def _settings(processor: object) -> str:
    keys = ("size", "crop_size", "resample", "do_center_crop", "image_mean", "image_std", "rescale_factor")
    inner = getattr(processor, "image_processor", processor)
    return ", ".join(f"{key}={getattr(inner, key)}" for key in keys if hasattr(inner, key))


class Inception:
    """torch-fidelity's port of the 2015-12-05 Inception graph; `path` is its weight file, which is not downloaded.

    `verified` is True if the file's SHA-256 begins with INCEPTION_SHA256; otherwise the result is not called FID.
    """

    name = "inception-v3-compat"
    preprocessing = "TF1 bilinear resize to 299 inside the network, no antialias"

    def __init__(self, path: str | Path | None = None, device: str | torch.device = "cpu"):
        path = Path(path) if path else Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
        if not path.is_file():
            need = f"torch-fidelity's {INCEPTION_FILE} is needed"
            raise FileNotFoundError(f"there is no Inception weight file {path}; {need}.")
        actual = file_digest(path)
        if not actual.startswith(INCEPTION_SHA256):
            raise ValueError(f"{path} has SHA-256 {actual[:8]}, not {INCEPTION_SHA256} of the 2015-12-05 Inception.")
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        self.verified, self.device = True, torch.device(device)
        network = FeatureExtractorInceptionV3(self.name, ["2048"], feature_extractor_weights_path=str(path))
        self.network = network.to(self.device).eval()
        self.fingerprint = digest(self.name, actual, self.preprocessing)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(_checked(images).to(self.device))[0].float().cpu()


class FeatureTable(NamedTuple):
    """Features (n, d) of a folder's images, and one sentence for each file that could not be used."""

    features: torch.Tensor
    problems: list[str]


def read_features(
    folder: str | Path, extractor: FeatureExtractor, batch_size: int = 32, cache: str | Path | None = None
) -> FeatureTable:
    """Compute the features of a folder's images, in natural order of their names. The folder `cache` stores them, keyed
    by the images' bytes and the extractor's fingerprint.
    """
    if cache is None:
        return _extract(folder, extractor, batch_size)
    key = digest(extractor.fingerprint, [file_digest(path) for path in image_files(folder)])
    path = Path(cache) / f"{extractor.name.replace('/', '-')}-{key}.safetensors"
    if path.is_file():
        with safe_open(path, "pt") as file:
            return FeatureTable(file.get_tensor("features"), json.loads(file.metadata()["problems"]))
    table = _extract(folder, extractor, batch_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        save_file({"features": table.features}, draft, {"problems": json.dumps(table.problems)})
    return table


def _extract(folder: str | Path, extractor: FeatureExtractor, batch_size: int) -> FeatureTable:
    """Compute features in batches of images of the same size."""
    broken: list[tuple[Path, str]] = []
    batch: list[tuple[Path, np.ndarray]] = []
    parts: list[torch.Tensor] = []

    def flush() -> None:
        try:
            stack = torch.from_numpy(np.stack([pixels for _, pixels in batch]))
            parts.append(extractor(stack.permute(0, 3, 1, 2).contiguous()))
        except ValueError as error:  # the extractor does not take images of this size
            broken.extend((path, f"{path}: {error}") for path, _ in batch)

    for path, image in iter_images(with_progress(image_files(folder)), broken):
        pixels = np.asarray(image)
        if batch and (len(batch) == batch_size or batch[0][1].shape != pixels.shape):
            flush()
            batch = []
        batch.append((path, pixels))
    if batch:
        flush()
    problems = [reason for _, reason in broken]
    if not parts:
        first = f"the first problem: {problems[0]}, expected readable images"
        raise ValueError(f"no image of the folder {folder} can be used; {first}.")
    return FeatureTable(torch.cat(parts), problems)


def result(
    name: str, generated: FeatureTable, reference: FeatureTable, extractor: FeatureExtractor, **values: object
) -> dict:
    """Return a result row. Different counts are a problem, because most metrics depend on n."""
    n, n_reference = len(generated.features), len(reference.features)
    problems = [*generated.problems, *reference.problems]
    if n != n_reference:
        problems.append(f"different counts: {n} images against {n_reference} of the reference")
    described = {key: getattr(extractor, key) for key in ("fingerprint", "preprocessing")}
    counts = {"n": n, "n_reference": n_reference, "extractor": extractor.name}
    return {"name": name, **values, **counts, **described, "problems": problems}
