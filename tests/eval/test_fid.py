"""Frechet distance and its family: numerics, parity with torch-fidelity, references, folders."""

import itertools
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny_clip
from visspec.eval.metrics import fid, kid
from visspec.eval.metrics.features import (
    FeatureTable,
    Inception,
    RandomConv,
    TransformersFeatures,
    metric_name,
    read_features,
)


def draws(n: int, d: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    """Correlated Gaussian features with unequal scales, float64 (n, d)."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=torch.Generator().manual_seed(99), dtype=torch.float64) / d**0.5
    return torch.randn(n, d, generator=g, dtype=torch.float64) @ mix + shift


def tolerance(value: float, x: torch.Tensor, y: torch.Tensor) -> float:
    """The promised agreement: 1e-6 of the distance plus 1e-8 of the traces."""
    return 1e-6 * abs(value) + 1e-8 * float(x.var(0).sum() + y.var(0).sum())


def test_degenerate_features_refused():
    for bad in (torch.zeros(1, 4), torch.tensor([[0.0] * 4, [float("nan")] * 4])):
        with pytest.raises(ValueError, match="must be finite and of at least 2 images"):
            fid.from_features(bad, draws(9, 4, 0))


# --- distance ---


@pytest.mark.parametrize(("n", "m"), [(20, 20), (20, 400), (400, 20), (48, 49), (400, 300)])
def test_distance_equals_formula(n: int, m: int):
    d = 48
    x, y = draws(n, d, 1), draws(m, d, 2, 0.3)
    scale = float(x.var(0).sum() + y.var(0).sum())
    assert abs(fid.from_features(x, x)) < 1e-11 * scale
    assert abs(fid.from_features(x, y) - fid.from_features(y, x)) < 1e-10 * scale
    a, b = (torch.from_numpy(np.cov(rows.numpy().T)) for rows in (x, y))
    values, vectors = torch.linalg.eigh(a)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    shared = torch.linalg.eigvalsh(root @ b @ root).clamp_min(0).sqrt().sum()
    formula = (x.mean(0) - y.mean(0)).square().sum() + a.trace() + b.trace() - 2 * shared
    assert abs(fid.from_features(x, y) - float(formula)) < 1e-6 * scale


@pytest.mark.parametrize(("n", "d", "shift"), [(400, 64, 0.5), (300, 32, 0.0), (2000, 128, 0.01)])
def test_parity_with_torch_fidelity(n: int, d: int, shift: float):
    other = pytest.importorskip("torch_fidelity.metric_fid")
    x, y = draws(n, d, 3), draws(n + 50, d, 4, shift)
    theirs = other.fid_statistics_to_metric(
        other.fid_features_to_statistics(x), other.fid_features_to_statistics(y), verbose=False
    )["frechet_inception_distance"]
    ours = fid.from_features(x, y)
    assert abs(ours - theirs) <= tolerance(theirs, x, y)
    assert abs(fid.from_features(x, y + 0.05) - theirs) > tolerance(theirs, x, y)  # the bound can be missed


# --- the rest of the family ---


def test_kid_is_a_double_loop():
    x, y = draws(25, 8, 7), draws(25, 8, 8, 0.5)
    k = lambda a, b: (float(a @ b) / 8 + 1) ** 3  # noqa: E731
    xx = np.mean([k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    yy = np.mean([k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    xy = np.mean([k(a, b) for a in x for b in y])
    assert kid.from_features(x, y, 3, 25) == pytest.approx((xx + yy - 2 * xy, 0), abs=1e-9)


# --- extractor, references, folders ---


def folder_of(path: Path, n: int, seed: int, divide: int = 1) -> Path:
    path.mkdir()
    rng = np.random.default_rng(seed)
    for i in range(n):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) // np.uint8(divide)
        Image.fromarray(pixels).save(path / f"{i}.png")
    return path


def test_random_conv():
    extractor = RandomConv()
    image = torch.arange(3 * 32 * 32, dtype=torch.uint8).reshape(1, 3, 32, 32)
    features = extractor(torch.cat([image, 255 - image]))
    assert features.shape == (2, 256) and not torch.allclose(features[0], features[1], atol=0.01)
    assert torch.allclose(extractor(image)[0], features[0], atol=1e-5)
    assert features[0].double().sum().item() == pytest.approx(GOLDEN_CONV, rel=1e-4)
    with pytest.raises(ValueError, match="uint8"):
        extractor(image.float())
    with pytest.raises(ValueError, match="16 x 16"):
        extractor(image[..., :8])
    RandomConv.weights_sha256, kept = "0" * 16, RandomConv.weights_sha256
    try:
        with pytest.raises(RuntimeError, match="weights have hash"):
            RandomConv()
    finally:
        RandomConv.weights_sha256 = kept


GOLDEN_CONV = 53.991126


def test_compare_folders(tmp_path: Path):
    extractor = RandomConv()
    reference = read_features(folder_of(tmp_path / "ref", 24, 0), extractor)
    same = fid.compare(read_features(folder_of(tmp_path / "same", 24, 1), extractor), reference, extractor)
    other = folder_of(tmp_path / "other", 23, 2, divide=4)
    (other / "5.png").write_bytes(b"\x89PNG broken")
    Image.new("RGB", (8, 8)).save(other / "7b.png")  # readable, but too small for the extractor
    result = fid.compare(read_features(other, extractor, batch_size=5), reference, extractor)
    assert result["n"] == 22 and result["n_reference"] == 24 and result["noise_floor_n"] == 12
    assert result["value"] > 1.5 * same["value"] and same["value"] < 2 * same["noise_floor_here"]
    text = " ".join(result["problems"])
    assert "5.png" in text and "7b.png: images must be at least 16 x 16" in text and "different counts: 22" in text
    assert json.loads(json.dumps(result))["name"] == "FD[random-conv]"


@pytest.mark.parametrize("n, n_reference", [(200, 200), (80, 400)])
def test_noise_floor(n: int, n_reference: int):
    """Over 60 draws of one law the mean distance is the floor; twice or half the floor would be far out of bounds."""
    extractor = types.SimpleNamespace(name="rows", fingerprint="f", preprocessing="none")
    rng = torch.Generator().manual_seed(0)
    values, floors = [], []
    for _ in range(60):
        rows, drawn = (FeatureTable(torch.randn(count, 6, generator=rng), []) for count in (n_reference, n))
        result = fid.compare(drawn, rows, extractor)
        halves = rows.features[::2], rows.features[1::2]
        assert result["noise_floor"] == pytest.approx(fid.from_features(*halves), rel=1e-6)
        assert result["noise_floor_n"] == n_reference // 2
        values.append(result["value"])
        floors.append(result["noise_floor_here"])
    assert np.mean(values) / np.mean(floors) == pytest.approx(1.0, abs=0.15)


def test_cache_key(tmp_path: Path):
    extractor, images, cache = RandomConv(), folder_of(tmp_path / "ref", 12, 0), tmp_path / "cache"
    (images / "7.png").write_bytes(b"no")
    first = read_features(images, extractor, cache=cache)
    (file,) = cache.iterdir()
    stamp = file.stat().st_mtime_ns
    again = read_features(images, extractor, cache=cache)
    assert file.stat().st_mtime_ns == stamp and torch.equal(again.features, first.features)
    assert again.problems == first.problems and "7.png" in again.problems[0]
    Image.new("RGB", (32, 32)).save(images / "3.png")
    changed = read_features(images, extractor, cache=cache)
    assert len(list(cache.iterdir())) == 2 and not torch.equal(changed.features, first.features)
    other = RandomConv()
    other.fingerprint = "0" * 16
    read_features(images, other, cache=cache)
    assert len(list(cache.iterdir())) == 3


def test_only_inception_is_named_fid(tmp_path: Path):
    assert metric_name(RandomConv()) == "FD[random-conv]"
    (tmp_path / "weights.pth").write_bytes(b"not the weights")
    with pytest.raises(ValueError, match="not 6726825d"):
        Inception(tmp_path / "weights.pth")
    with pytest.raises(FileNotFoundError, match="Inception weight file"):
        Inception(tmp_path / "none.pth")
    checked = Inception.__new__(Inception)
    checked.verified = True
    assert metric_name(checked) == "FID"
    checked.verified = False
    assert metric_name(checked) == "FD[inception-v3-compat]"


def test_extractors_tiny(tmp_path: Path):
    from transformers import BitImageProcessor, CLIPImageProcessor, Dinov2Config, Dinov2Model

    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    clip, _ = tiny_clip.clip(tmp_path)
    extractors = [
        TransformersFeatures(clip, CLIPImageProcessor(**sizes), "clip-tiny"),
        TransformersFeatures(Dinov2Model(Dinov2Config(**tiny_clip.VISION)), BitImageProcessor(**sizes), "dino-tiny"),
    ]
    images = torch.randint(0, 256, (5, 3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for extractor, dim in zip(extractors, [12, 16]):
        features = extractor(images)
        assert features.shape == (5, dim) and features.dtype == torch.float32
        assert torch.allclose(extractor(images[2:3])[0], features[2], atol=1e-4)
        assert metric_name(extractor) == f"FD[{extractor.name}]"
    assert len({e.fingerprint for e in extractors}) == 2
    again = TransformersFeatures(extractors[0].model, CLIPImageProcessor(**sizes | {"resample": 0}), "clip-tiny")
    assert again.fingerprint != extractors[0].fingerprint  # another resize is another metric
    with torch.no_grad():
        next(clip.parameters()).add_(1e-3)
    assert TransformersFeatures(clip, CLIPImageProcessor(**sizes), "clip-tiny").fingerprint != extractors[0].fingerprint


def test_kid_of_folders(tmp_path: Path):
    extractor = RandomConv()
    a, b = folder_of(tmp_path / "a", 13, 0), folder_of(tmp_path / "b", 14, 1, divide=4)
    (a / "2.png").write_bytes(b"broken")
    x, y = read_features(a, extractor), read_features(b, extractor)
    row = kid.compare(x, y, extractor, subsets=3, subset_size=10)
    assert row["name"] == "KID[random-conv]" and row["value"] == kid.from_features(x.features, y.features, 3, 10)[0]
    assert (row["n"], row["n_reference"], row["fingerprint"]) == (12, 14, extractor.fingerprint)
    assert len(row["problems"]) == 2 and "2.png" in row["problems"][0]
    assert "different counts: 12" in row["problems"][1]


# --- the distance over pairs ---


def pairs(n, shift=0.0, seed=0, dim=6):
    """Features of two draws a prompt, of prompts that differ far more than draws; the second is shifted."""
    generator = torch.Generator().manual_seed(seed)
    prompt, first, second = (torch.randn(n, dim, generator=generator) for _ in range(3))
    return 2 * prompt + 0.3 * first, 2 * prompt + 0.3 * second + shift


def test_paired_kid():
    first, second = (x.double() for x in pairs(5, 0.2))
    k = lambda a, b: (float(a @ b) / 6 + 1) ** 3  # noqa: E731
    of_two = [
        k(first[i], first[j]) + k(second[i], second[j]) - k(first[i], second[j]) - k(second[i], first[j])
        for i, j in itertools.permutations(range(5), 2)
    ]
    assert kid.paired(first, second).value == pytest.approx(sum(of_two) / 20)
    assert kid.paired(first, first) == (0.0, 0.0)


def test_paired_floor():
    result = [kid.paired(*pairs(24, seed=s)) for s in range(400)]
    assert 0.02 <= sum(one.value > one.floor for one in result) / 400 <= 0.08


def test_pairs_versus_sets():
    first, second = pairs(48, 0.2)
    result = kid.paired(first, second)
    assert result.value > 2 * result.floor
    noise = [fid.from_features(pairs(48, seed=s)[0], pairs(48, seed=s + 50)[0]) for s in range(20)]
    assert fid.from_features(first, second) < min(noise)
