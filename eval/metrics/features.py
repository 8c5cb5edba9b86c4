"""Feature extractors with a common protocol, and a fixed random convolution that needs no download.

An extractor maps uint8 images (n, 3, h, w) to features (n, dim). Preprocessing is part of the metric, so it is
described in `preprocessing` and included in `fingerprint`, with a hash of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from visspec.eval.metrics.detection import digest, file_digest
from visspec.eval.metrics.results import with_progress
from visspec.io.images import image_files, iter_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INCEPTION_SHA256 = "6726825d"  # first hex digits, also in torch-fidelity's file name
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"


class FeatureExtractor(Protocol):
    """`fingerprint` identifies weights and preprocessing; features with different ones are not comparable."""

    name: str
    dim: int
    fingerprint: str
    preprocessing: str

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (n, 3, h, w) -> floating (n, dim)."""


def metric_name(extractor: FeatureExtractor, verified: str = "FID", other: str = "FD") -> str:
    """`FID` for the Inception weights with the checked hash, else `FD[name]`; other metrics pass their own names."""
    genuine = isinstance(extractor, Inception) and extractor.verified
    return verified if genuine else f"{other}[{extractor.name}]"


def weights_hash(module: torch.nn.Module) -> str:
    """Hash of every parameter and buffer of a module, names included."""
    h = sha256()
    for name, value in sorted(module.state_dict().items()):
        h.update(name.encode())
        h.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def _checked(images: torch.Tensor) -> torch.Tensor:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images must be uint8 (n, 3, h, w), not {images.dtype} {tuple(images.shape)}")
    return images


class RandomConv:
    """Four fixed random 3x3 convolutions with stride 2 and ReLU; mean and standard deviation over space, 256 values.

    The weights are from numpy's legacy RandomState, whose stream is stable, and their hash is checked.
    """

    name = "random-conv"
    dim = 256
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
        found = h.hexdigest()[:16]
        if found != self.weights_sha256:
            raise RuntimeError(f"random-conv weights have hash {found}, expected {self.weights_sha256}")
        self.device = torch.device(device)
        self.fingerprint = digest(self.name, found, self.preprocessing)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float32 (n, 256); images of at least 16 x 16 pixels."""
        x = _checked(images).to(self.device).float() / 127.5 - 1
        if min(x.shape[2:]) < 16:
            raise ValueError(f"images must be at least 16 x 16 pixels, not {x.shape[2]} x {x.shape[3]}")
        for weight in self.weights:
            x = torch.nn.functional.conv2d(x, weight, stride=2, padding=1).relu_()
        std, mean = torch.std_mean(x, dim=(2, 3), correction=0)
        return torch.cat([mean, std], dim=1).cpu()


def pixels(model: PreTrainedModel, processor: Callable, images: Iterable[Any]) -> torch.Tensor:
    """What a transformers processor makes of images, on the model's device and in its dtype."""
    return processor(images=list(images), return_tensors="pt")["pixel_values"].to(model.device, model.dtype)


class TransformersFeatures:
    """Image embeddings of a transformers model (CLIP's projection, DINOv2's class token) with its own processor."""

    kind: tuple[str, ...] = ()  # what else the fingerprint names

    def __init__(self, model: PreTrainedModel, processor: Callable, name: str):
        self.model, self.processor, self.name, self.dim = model.eval(), processor, name, self.width(model)
        self.preprocessing = f"transformers {type(processor).__name__} {_settings(processor)}"
        self.fingerprint = digest(name, *self.kind, weights_hash(model), self.preprocessing)

    def width(self, model: PreTrainedModel) -> int:
        config = model.config
        projected = hasattr(model, "get_image_features")
        return config.projection_dim if projected else getattr(config, "vision_config", config).hidden_size

    def features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Of preprocessed pixels, (n, dim)."""
        out = getattr(self.model, "get_image_features", self.model)(pixel_values=pixel_values)
        return out.pooler_output if out.pooler_output is not None else out.last_hidden_state[:, 0]

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float32 (n, dim)."""
        return self.features(pixels(self.model, self.processor, _checked(images))).float().cpu()


class Logits(TransformersFeatures):
    """Logits of a transformers image classifier as features, for the Inception score."""

    kind = ("logits",)

    def width(self, model: PreTrainedModel) -> int:
        return len(model.config.id2label or ())

    def features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values).logits


def _settings(processor: object) -> str:
    """The processor's settings that change pixels, as stable text."""
    keys = ("size", "crop_size", "resample", "do_center_crop", "image_mean", "image_std", "rescale_factor")
    inner = getattr(processor, "image_processor", processor)
    return ", ".join(f"{key}={getattr(inner, key)}" for key in keys if hasattr(inner, key))


class TimmFeatures:
    """Pooled features of a timm model such as `vit_large_patch14_dinov2.lvd142m`, resized and normalised for it."""

    def __init__(self, model: torch.nn.Module, name: str):
        from timm.data import resolve_model_data_config

        self.model, self.name = model.eval(), name
        self.config = resolve_model_data_config(model)
        # A model created with another img_size still has the pretrained size in its configuration.
        fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if fixed:
            self.config["input_size"] = (3, *fixed)
        self.dim: int = model.num_features  # type: ignore[assignment]  # timm sets it on every model
        keys = ("input_size", "interpolation", "mean", "std")
        described = ", ".join(f"{key}={self.config[key]}" for key in keys)
        self.preprocessing = f"torch interpolate with antialias to input_size, centre crop none; {described}"
        self.fingerprint = digest(self.name, weights_hash(model), self.preprocessing)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float32 (n, dim): `forward_head(forward_features(x), pre_logits=True)`."""
        parameter = next(self.model.parameters())
        mode = self.config["interpolation"] if self.config["interpolation"] in ("bicubic", "bilinear") else "bicubic"
        x = _checked(images).to(parameter.device).float() / 255
        x = torch.nn.functional.interpolate(x, self.config["input_size"][1:], mode=mode, antialias=True).clamp(0, 1)
        mean, std = (x.new_tensor(self.config[key])[:, None, None] for key in ("mean", "std"))
        x = ((x - mean) / std).to(parameter.dtype)
        features = self.model.forward_features(x)  # type: ignore[operator]  # timm's, of every model of it
        return self.model.forward_head(features, pre_logits=True).float().cpu()  # type: ignore[operator]


class Inception:
    """torch-fidelity's port of the 2015-12-05 Inception graph; `path` is its weight file, which is not downloaded.

    `verified` is True if the file's SHA-256 begins with INCEPTION_SHA256; otherwise the result is not called FID.
    """

    name = "inception-v3-compat"
    dim = 2048
    preprocessing = "TF1 bilinear resize to 299 inside the network, no antialias"

    def __init__(self, path: str | Path | None = None, device: str | torch.device = "cpu"):
        path = Path(path) if path else Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
        if not path.is_file():
            needed = f"torch-fidelity's {INCEPTION_FILE} is needed"
            raise FileNotFoundError(f"there is no Inception weight file {path}; {needed}")
        found = file_digest(path)
        if not found.startswith(INCEPTION_SHA256):
            raise ValueError(f"{path} has SHA-256 {found[:8]}, not {INCEPTION_SHA256} of the 2015-12-05 Inception")
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        self.verified, self.device = True, torch.device(device)
        network = FeatureExtractorInceptionV3(self.name, ["2048"], feature_extractor_weights_path=str(path))
        self.network = network.to(self.device).eval()
        self.fingerprint = digest(self.name, found, self.preprocessing)

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float32 (n, 2048)."""
        return self.network(_checked(images).to(self.device))[0].float().cpu()


@dataclass(frozen=True)
class FeatureTable:
    """Result of `gather`: number of images, hash of their bytes in order, a sentence for every skipped file."""

    n: int
    content: str
    problems: tuple[str, ...]


def gather(
    folder: str | Path,
    extractor: FeatureExtractor,
    sink: Callable[[torch.Tensor], object],
    batch_size: int = 32,
) -> FeatureTable:
    """Features of a folder's images, in natural order, passed to `sink` in batches; unusable files are listed.

    A new batch begins if the image size changes.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    broken: list[tuple[Path, str]] = []
    batch: list[tuple[Path, np.ndarray]] = []
    n, content = 0, sha256()

    def flush() -> int:
        try:
            stack = torch.from_numpy(np.stack([pixels for _, pixels in batch]))
            features = extractor(stack.permute(0, 3, 1, 2).contiguous())
        except ValueError as error:  # the size of the batch is not supported by the extractor
            broken.extend((path, f"{path}: {error}") for path, _ in batch)
            return 0
        sink(features)
        for path, _ in batch:
            content.update(file_digest(path).encode())
        return len(batch)

    for path, image in iter_images(with_progress(image_files(folder)), broken):
        pixels = np.asarray(image)
        if batch and (len(batch) == batch_size or batch[0][1].shape != pixels.shape):
            n += flush()
            batch = []
        batch.append((path, pixels))
    n += flush() if batch else 0
    problems = tuple(reason for _, reason in broken)
    if not n:
        first = f"the first problem: {problems[0]}, expected readable images"
        raise ValueError(f"no image of the folder {folder} can be used; {first}")
    return FeatureTable(n, content.hexdigest()[:16], problems)


def table(folder: str | Path, extractor: FeatureExtractor, batch_size: int = 32) -> tuple[torch.Tensor, FeatureTable]:
    """All features of a folder (n, dim), for the metrics that need the rows, and the result of `gather`."""
    parts: list[torch.Tensor] = []
    gathered = gather(folder, extractor, parts.append, batch_size)
    return torch.cat(parts), gathered


@dataclass(frozen=True)
class Pair:
    """Feature tables of a generated and a reference folder by one extractor, with the problems to report."""

    generated: torch.Tensor
    reference: torch.Tensor
    extractor: FeatureExtractor
    problems: tuple[str, ...]

    def result(self, name: str, values: dict[str, float]) -> dict:
        """A result row: name, values, both counts, extractor and problems."""
        described = {"extractor": self.extractor.name, "fingerprint": self.extractor.fingerprint}
        counts = {"n": len(self.generated), "n_reference": len(self.reference)}
        return {"name": name, **values, **counts, **described, "problems": list(self.problems)}


def pair(generated: str | Path, reference: str | Path, extractor: FeatureExtractor, batch_size: int = 32) -> Pair:
    """Features of two folders by one extractor; different counts are a problem, because most metrics depend on N."""
    (x, first), (y, second) = (table(folder, extractor, batch_size) for folder in (generated, reference))
    problems = [*first.problems, *second.problems]
    if len(x) != len(y):
        problems.append(f"different counts: {len(x)} images against {len(y)} of the reference")
    return Pair(x, y, extractor, tuple(problems))
