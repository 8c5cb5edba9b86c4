"""Cached statistics of a reference image set: a safetensors file with a JSON file beside it, keyed by content.

The key hashes the images' bytes, the extractor's fingerprint and this format's version, so a changed image or another
extractor never uses an old entry. Files are written under a temporary name and renamed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from visspec.eval.metrics.detection import digest, file_digest
from visspec.eval.metrics.features import FeatureExtractor, gather
from visspec.eval.metrics.statistics import GaussianStats, merge_parts
from visspec.io.files import replacing, write_json
from visspec.io.images import image_files

FORMAT = 1


@dataclass(frozen=True)
class Reference:
    """Statistics of all images and of its two halves (every second image), and the extractor."""

    stats: GaussianStats
    halves: tuple[GaussianStats, GaussianStats]
    extractor: str
    fingerprint: str
    preprocessing: str
    content: str
    problems: tuple[str, ...] = ()

    def require(self, extractor: FeatureExtractor) -> None:
        """ValueError unless this extractor made the reference."""
        if extractor.fingerprint != self.fingerprint:
            raise ValueError(
                f"the reference was made with {self.extractor} ({self.fingerprint}), "
                f"not with {extractor.name} ({extractor.fingerprint}); make it again with the same extractor"
            )


def from_features(features: torch.Tensor, extractor: FeatureExtractor) -> Reference:
    """A reference from a feature table (n, d), n at least 4."""
    halves = _Halves(extractor)
    halves.add(features)
    return halves.reference("", ())


class _Halves:
    """Splits a stream of features into even and odd rows."""

    def __init__(self, extractor: FeatureExtractor):
        self.extractor, self.seen = extractor, 0
        self.parts = GaussianStats(extractor.dim), GaussianStats(extractor.dim)

    def add(self, features: torch.Tensor) -> None:
        for i in (0, 1):
            self.parts[(self.seen + i) % 2].update(features[i::2])
        self.seen += len(features)

    def reference(self, content: str, problems: tuple[str, ...]) -> Reference:
        if self.seen < 4:
            raise ValueError(f"a reference needs at least 4 images, not {self.seen}")
        names = self.extractor.name, self.extractor.fingerprint, self.extractor.preprocessing
        return Reference(merge_parts(list(self.parts)), self.parts, *names, content, problems)


def from_folder(
    folder: str | Path, extractor: FeatureExtractor, cache: str | Path | None = None, batch_size: int = 32
) -> Reference:
    """Reference of a folder's images, read from the cache folder if it has one for these images and extractor."""
    if cache is None:
        halves = _Halves(extractor)
        gathered = gather(folder, extractor, halves.add, batch_size)
        return halves.reference(gathered.content, gathered.problems)
    files = image_files(folder)
    key = digest(FORMAT, extractor.fingerprint, [file_digest(path) for path in files])
    path = Path(cache) / f"{extractor.name}-{key}.safetensors"
    if path.exists() and path.with_suffix(".json").exists():
        reference = load(path)
        reference.require(extractor)
        return reference
    reference = from_folder(folder, extractor, None, batch_size)
    save(reference, path)
    return reference


def save(reference: Reference, path: str | Path) -> None:
    """Write `path` (.safetensors) and its JSON file atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {"all": reference.stats, "first": reference.halves[0], "second": reference.halves[1]}
    tensors = {f"{name}.{k}": v.contiguous() for name, part in parts.items() for k, v in part.state_dict().items()}
    data = to_bytes(tensors)
    described = {key: getattr(reference, key) for key in ("extractor", "fingerprint", "preprocessing", "content")}
    described |= {"format": FORMAT, "n": reference.stats.n, "problems": list(reference.problems)}
    described["tensors"] = digest(data)
    with replacing(path) as draft:
        draft.write_bytes(data)
    write_json(path.with_suffix(".json"), described)


def load(path: str | Path) -> Reference:
    """Read files written by `save`; ValueError if one is damaged or the two do not belong together."""
    path = Path(path)
    try:
        data = path.read_bytes()
        described = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if described["format"] != FORMAT:
            raise ValueError(f"its format is {described['format']}, this version reads {FORMAT}")
        if described["tensors"] != digest(data):
            raise ValueError("its JSON file describes other tensors")
        tensors = from_bytes(data)
        parts = []
        for name in ("all.", "first.", "second."):
            state = {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}
            parts.append(GaussianStats.from_state_dict(state))
        fields = {key: str(described[key]) for key in ("extractor", "fingerprint", "preprocessing", "content")}
        return Reference(parts[0], (parts[1], parts[2]), problems=tuple(described["problems"]), **fields)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"the reference {path} cannot be used: {error}") from None
