"""Frechet distance and its family: numerics, parity with torch-fidelity and torchmetrics, references, folders."""

import dataclasses
import json
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny_clip
from visspec.eval.metrics import cmmd, fid, inception_score, kid, precision_recall, references
from visspec.eval.metrics.features import (
    Inception,
    RandomConv,
    TimmFeatures,
    TransformersFeatures,
    gather,
    metric_name,
    pair,
    table,
)
from visspec.eval.metrics.statistics import GaussianStats, merge_parts
from visspec.io import included


def draws(n: int, d: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    """Correlated Gaussian features with unequal scales, float64 (n, d)."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=torch.Generator().manual_seed(99), dtype=torch.float64) / d**0.5
    return torch.randn(n, d, generator=g, dtype=torch.float64) @ mix + shift


def tolerance(value: float, x: torch.Tensor, y: torch.Tensor) -> float:
    """The promised agreement: 1e-6 of the distance plus 1e-8 of the traces."""
    return 1e-6 * abs(value) + 1e-8 * float(x.var(0).sum() + y.var(0).sum())


# --- statistics ---


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("n", [40, 2000])
def test_eight_shards_equal_one_pass_in_any_order(offset: float, n: int):
    x = draws(n, 64, 0) + offset
    whole = GaussianStats(64).update(x)
    parts = [GaussianStats(64).update(shard) for shard in x.tensor_split(8)]
    for order in (parts, parts[::-1], [parts[i] for i in (3, 1, 4, 0, 5, 7, 2, 6)]):
        one = merge_parts(order)
        assert one.n == n
        assert torch.allclose(one.mean, whole.mean, rtol=1e-12, atol=1e-12)
        assert (one.covariance - whole.covariance).abs().max() < 1e-9 * whole.covariance.abs().max()
    chained = GaussianStats(64)
    for part in parts:
        chained.merge(part)
    reference = torch.from_numpy(np.cov((x - offset).numpy().T))
    assert (chained.covariance - reference).abs().max() < 1e-9 * reference.abs().max()
    assert sum(part.n for part in parts) == n  # merging leaves the parts alone


def test_statistics_round_trip_and_refuse_what_does_not_fit():
    for n in (10, 100):
        stats = GaussianStats(16).update(draws(n, 16, 1))
        again = GaussianStats.from_state_dict(stats.state_dict())
        assert again.n == n and torch.equal(again.scatter, stats.scatter)
        assert (again.rows is None) == (n > 16)
    with pytest.raises(ValueError, match=r"must be \(n, 16\), not \(3, 5\)"):
        stats.update(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="1 of 2 rows"):
        stats.update(torch.tensor([[0.0] * 16, [float("nan")] * 16]))
    with pytest.raises(ValueError, match="8 dimensions"):
        stats.merge(GaussianStats(8).update(draws(4, 8, 0)))
    with pytest.raises(ValueError, match="lack scatter"):
        GaussianStats.from_state_dict({"n": torch.tensor(1), "mean": stats.mean})
    with pytest.raises(ValueError, match="shapes"):
        GaussianStats.from_state_dict(stats.state_dict() | {"scatter": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="at least 2 images, not 0"):
        _ = GaussianStats(4).covariance


# --- distance ---


def test_distance_of_known_gaussians():
    """Diagonal covariances have a closed form: sum (sqrt a - sqrt b)^2 + |shift|^2."""
    x = torch.randn(500, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.linalg.qr(x - x.mean(0)).Q * 499**0.5  # exactly white
    a, b = torch.tensor([1.0, 4, 9, 1, 2, 3]).double(), torch.tensor([4.0, 1, 9, 2, 1, 5]).double()
    expected = float((a.sqrt() - b.sqrt()).square().sum()) + 6 * 0.25
    assert abs(fid.from_features(x * a.sqrt(), x * b.sqrt() + 0.5) - expected) < 1e-10


@pytest.mark.parametrize(("n", "m"), [(20, 20), (20, 400), (400, 20), (48, 49), (400, 300)])
def test_distance_is_zero_on_itself_symmetric_and_the_same_on_both_paths(n: int, m: int):
    d = 48
    x, y = draws(n, d, 1), draws(m, d, 2, 0.3)
    scale = float(x.var(0).sum() + y.var(0).sum())
    assert abs(fid.from_features(x, x)) < 1e-11 * scale
    assert abs(fid.from_features(x, y) - fid.from_features(y, x)) < 1e-10 * scale
    a, b = GaussianStats(d).update(x), GaussianStats(d).update(y)
    by_rows = fid.frechet_distance(a, b)
    a.rows = b.rows = None
    assert abs(fid.frechet_distance(a, b) - by_rows) < 1e-6 * scale


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


def test_parity_with_torchmetrics():
    module = pytest.importorskip("torchmetrics.image.fid")

    class Same(torch.nn.Module):
        num_features = 32

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x, y = draws(300, 32, 5), draws(350, 32, 6, 0.4)
    metric = module.FrechetInceptionDistance(feature=Same(), input_img_size=(32,)).set_dtype(torch.float64)
    metric.update(x, real=True)
    metric.update(y, real=False)
    theirs = float(metric.compute())
    assert abs(fid.from_features(x, y) - theirs) <= tolerance(theirs, x, y)


def test_golden_numbers_without_the_other_libraries():
    rng = np.random.RandomState(0)
    x, y = (torch.from_numpy(rng.standard_normal((60, 8)) * (1 + np.arange(8)) + s) for s in (0.0, 0.5))
    assert abs(fid.from_features(x, y) - GOLDEN["fid"]) < 1e-9
    assert abs(kid.from_features(x, y, 1, 60)[0] - GOLDEN["kid"]) < 1e-9 * abs(GOLDEN["kid"])
    assert abs(cmmd.from_features(x, y) - GOLDEN["cmmd"]) < 1e-9


# The first agrees with torch-fidelity 0.4.0 to 1e-12 on the same features.
GOLDEN = {"fid": 22.783420959227897, "kid": 1129.675265418964, "cmmd": 0.5537721544248697}


# --- the rest of the family ---


def test_kid_is_a_double_loop():
    x, y = draws(25, 8, 7), draws(25, 8, 8, 0.5)
    k = lambda a, b: (float(a @ b) / 8 + 1) ** 3  # noqa: E731
    xx = np.mean([k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    yy = np.mean([k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    xy = np.mean([k(a, b) for a in x for b in y])
    assert kid.from_features(x, y, 3, 25) == pytest.approx((xx + yy - 2 * xy, 0), abs=1e-9)
    with pytest.raises(ValueError, match="at most the number of images, 25 and 25, not 1000"):
        kid.from_features(x, y)
    with pytest.raises(ValueError, match="at least 2 images on each side, not 1"):
        kid.from_features(x, y, 3, 1)


def test_cmmd_is_the_published_formula():
    x, y = draws(12, 5, 9), draws(9, 5, 10, 1.0)
    u, v = (t / t.norm(dim=1, keepdim=True) for t in (x, y))
    k = lambda a, b: np.mean([np.exp(-float((p - q).square().sum()) / 200) for p in a for q in b])  # noqa: E731
    assert abs(cmmd.from_features(x, y) - 1000 * (k(u, u) + k(v, v) - 2 * k(u, v))) < 1e-9
    assert cmmd.from_features(x, x) == pytest.approx(0, abs=1e-9)


def test_precision_recall_are_the_formula_and_mean_what_they_say():
    x, y = draws(120, 6, 11), draws(150, 6, 12, 0.8)
    ours = precision_recall.from_features(x, y)
    within = lambda a, b: (a[:, None] - b).norm(dim=2) <= (b[:, None] - b).norm(dim=2).sort(1).values[:, 3]  # noqa: E731
    p, r = (float(within(*pair).any(1).double().mean()) for pair in ((x, y), (y, x)))
    assert 0 < p != r > 0 and ours == pytest.approx(
        {"precision": p, "recall": r, "f_score": 2 * p * r / (p + r)}, abs=1e-6
    )
    with pytest.raises(ValueError, match="3 neighbours need more than 3 images, not 3"):
        precision_recall.from_features(x[:3], y)
    collapsed = precision_recall.from_features(y[:4].repeat(20, 1), y)
    assert collapsed["precision"] == 1.0 and collapsed["recall"] < 0.1
    assert precision_recall.from_features(x, y + 100)["f_score"] == 0.0


def test_inception_score_is_the_formula_and_keeps_its_bounds():
    logits = draws(205, 10, 13) * 3
    p = (logits.exp() / logits.exp().sum(1, keepdim=True)).split([20, 21] * 5)
    scores = [float((q * (q / q.mean(0)).log()).sum(1).mean().exp()) for q in p]
    ours = inception_score.from_logits(logits, shuffle=False)
    assert ours == pytest.approx((np.mean(scores), np.std(scores)), abs=1e-9)
    assert inception_score.from_logits(logits) != pytest.approx(ours, abs=1e-6)
    assert inception_score.from_logits(torch.zeros(20, 10))[0] == pytest.approx(1)
    sure = torch.eye(10).repeat(5, 1) * 100
    assert inception_score.from_logits(sure, splits=5, shuffle=False)[0] == pytest.approx(10)
    with pytest.raises(ValueError, match="10 splits"):
        inception_score.from_logits(logits[:9])


# --- extractor, references, folders ---


def folder_of(path: Path, n: int, seed: int, divide: int = 1) -> Path:
    path.mkdir()
    rng = np.random.default_rng(seed)
    for i in range(n):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) // np.uint8(divide)
        Image.fromarray(pixels).save(path / f"{i}.png")
    return path


def test_random_conv_is_fixed_and_sees_differences():
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


def test_folder_against_reference_prints_n_and_floor_and_lists_broken_files(tmp_path: Path):
    extractor = RandomConv()
    reference = references.from_folder(folder_of(tmp_path / "ref", 24, 0), extractor)
    same = fid.from_folder(folder_of(tmp_path / "same", 24, 1), reference, extractor)
    other = folder_of(tmp_path / "other", 23, 2, divide=4)
    (other / "5.png").write_bytes(b"\x89PNG broken")
    Image.new("RGB", (8, 8)).save(other / "7b.png")  # readable, but too small for the extractor
    result = fid.from_folder(other, reference, extractor, batch_size=5)
    assert result.n == 22 and result.n_reference == 24 and result.noise_floor_n == 12
    assert result.value > 1.5 * same.value and same.value < 2 * same.noise_floor_here
    text = " ".join(result.problems)
    assert "5.png" in text and "7b.png: images must be at least 16 x 16" in text and "different counts: 22" in text
    assert json.loads(json.dumps(dataclasses.asdict(result)))["name"] == "FD[random-conv]"


@pytest.mark.parametrize("n, n_reference", [(200, 200), (80, 400)])
def test_the_noise_floor_is_what_images_of_the_reference_law_score(n: int, n_reference: int):
    """Over 60 draws the distance of n rows to a reference of the same law is, on average, the floor it is read beside;
    with twice or half the floor it would be out of bounds by far.
    """
    extractor = types.SimpleNamespace(name="rows", dim=6, fingerprint="f", preprocessing="none")
    rng = torch.Generator().manual_seed(0)
    values, floors = [], []
    for _ in range(60):
        rows = torch.randn(n_reference, 6, generator=rng)
        reference = references.from_features(rows, extractor)
        result = fid.compare(GaussianStats(6).update(torch.randn(n, 6, generator=rng)), reference, extractor)
        assert result.noise_floor == pytest.approx(fid.from_features(rows[::2], rows[1::2]), rel=1e-6)
        assert result.noise_floor_n == n_reference // 2
        values.append(result.value)
        floors.append(result.noise_floor_here)
    assert np.mean(values) / np.mean(floors) == pytest.approx(1.0, abs=0.15)


def test_empty_and_unreadable_folders_are_refused(tmp_path: Path):
    extractor = RandomConv()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no image"):
        references.from_folder(tmp_path / "empty", extractor)
    (tmp_path / "empty" / "a.png").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"no image of the folder .* can be used; the first problem: .*a\.png"):
        gather(tmp_path / "empty", extractor, print)
    with pytest.raises(ValueError, match="at least 4 images"):
        references.from_folder(folder_of(tmp_path / "three", 3, 0), extractor)


def test_cache_is_keyed_by_content_and_refuses_another_extractor(tmp_path: Path):
    extractor, images, cache = RandomConv(), folder_of(tmp_path / "ref", 12, 0), tmp_path / "cache"
    first = references.from_folder(images, extractor, cache)
    (file,) = cache.glob("*.safetensors")
    assert sorted(p.suffix for p in cache.iterdir()) == [".json", ".safetensors"]
    stamp = file.stat().st_mtime_ns
    again = references.from_folder(images, extractor, cache)
    assert file.stat().st_mtime_ns == stamp and torch.equal(again.stats.scatter, first.stats.scatter)
    assert again.stats.rows is not None and torch.equal(again.stats.rows, first.stats.rows)
    Image.new("RGB", (32, 32)).save(images / "3.png")
    changed = references.from_folder(images, extractor, cache)
    assert len(list(cache.glob("*.safetensors"))) == 2 and not torch.equal(changed.stats.mean, first.stats.mean)

    other = RandomConv()
    other.name, other.fingerprint = "other", "0" * 16
    with pytest.raises(ValueError, match=r"made with random-conv \(.*\), not with other"):
        fid.compare(first.stats, references.load(file), other)


def test_damaged_cache_is_a_sentence(tmp_path: Path):
    extractor, images = RandomConv(), folder_of(tmp_path / "ref", 8, 0)
    references.from_folder(images, extractor, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.safetensors")
    good = file.read_bytes()
    file.write_bytes(good[:-50])
    with pytest.raises(ValueError, match="cannot be used: its JSON file describes other tensors"):
        references.load(file)
    file.write_bytes(good)
    file.with_suffix(".json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be used"):
        references.load(file)


def test_only_verified_inception_is_called_fid(tmp_path: Path):
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


def test_random_conv_distance_grows_with_damage(tmp_path: Path):
    rng, scenes = np.random.default_rng(0), included.scenes("shapes")
    prompts = scenes.prompts()
    clean = [scenes.render(prompts[i], rng, 64) for i in rng.integers(len(prompts), size=400)]
    extractor = RandomConv()
    stack = lambda images: extractor(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))  # noqa: E731
    base = stack(clean[:200])
    values = [fid.from_features(stack(clean[200:]), base)]
    for sigma in (4, 8, 16, 32):
        damaged = [np.rint(image + rng.normal(0, sigma, image.shape)).clip(0, 255) for image in clean[200:]]
        values.append(fid.from_features(stack([image.astype(np.uint8) for image in damaged]), base))
    assert values == sorted(values) and values[-1] > 2 * values[0]


@pytest.mark.nightly
def test_distance_costs_little_beside_its_extractor():
    """Statistics and distance of 2,000 images at most a tenth of the extractor's processor time."""
    extractor, stats = RandomConv(), GaussianStats(256)
    images = torch.randint(0, 256, (64, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    extractor(images)
    spent = {"extractor": 0.0, "statistics": 0.0}
    for _ in range(32):
        start = time.process_time()
        features = extractor(images)
        middle = time.process_time()
        stats.update(features)
        spent["extractor"] += middle - start
        spent["statistics"] += time.process_time() - middle
    start = time.process_time()
    fid.frechet_distance(stats, stats)
    at_end = time.process_time() - start  # once, whatever the number of images
    per_ten_thousand = (spent["statistics"] * 10_000 / 2048 + at_end) / (spent["extractor"] * 10_000 / 2048)
    assert per_ten_thousand < 0.1


def test_table_keeps_rows_in_natural_order(tmp_path: Path):
    images = folder_of(tmp_path / "a", 11, 3)
    features, met = table(images, RandomConv(), batch_size=4)
    assert features.shape == (11, 256) and met.n == 11
    alone = RandomConv()(torch.from_numpy(np.array(Image.open(images / "10.png"))).permute(2, 0, 1)[None])
    assert torch.allclose(features[10], alone[0], atol=1e-5)


def test_transformers_and_timm_extractors_run_on_tiny_random_models(tmp_path: Path):
    timm = pytest.importorskip("timm")
    from transformers import BitImageProcessor, CLIPImageProcessor, Dinov2Config, Dinov2Model

    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    clip, _ = tiny_clip.clip(tmp_path)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_classes=0)
    extractors = [
        TransformersFeatures(clip, CLIPImageProcessor(**sizes), "clip-tiny"),
        TransformersFeatures(Dinov2Model(Dinov2Config(**tiny_clip.VISION)), BitImageProcessor(**sizes), "dino-tiny"),
        TimmFeatures(vit, "vit-tiny"),
    ]
    images = torch.randint(0, 256, (5, 3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert [e.dim for e in extractors] == [12, 16, 24]
    for extractor in extractors:
        features = extractor(images)
        assert features.shape == (5, extractor.dim) and features.dtype == torch.float32
        assert torch.allclose(extractor(images[2:3])[0], features[2], atol=1e-4)
        assert metric_name(extractor) == f"FD[{extractor.name}]"
    assert len({e.fingerprint for e in extractors}) == 3
    again = TransformersFeatures(extractors[0].model, CLIPImageProcessor(**sizes | {"resample": 0}), "clip-tiny")
    assert again.fingerprint != extractors[0].fingerprint  # another resize is another metric
    with torch.no_grad():
        next(vit.parameters()).add_(1e-3)
    assert TimmFeatures(vit, "vit-tiny").fingerprint != extractors[2].fingerprint


def test_the_family_reads_folders_and_carries_counts_and_problems(tmp_path: Path):
    extractor = RandomConv()
    a, b = folder_of(tmp_path / "a", 13, 0), folder_of(tmp_path / "b", 14, 1, divide=4)
    (a / "2.png").write_bytes(b"broken")
    x, y = table(a, extractor)[0], table(b, extractor)[0]
    tables = pair(a, b, extractor)
    rows = [
        kid.from_pair(tables, subsets=3, subset_size=10),
        cmmd.from_pair(tables),
        precision_recall.from_pair(tables),
    ]
    assert [row["name"] for row in rows] == ["KID[random-conv]", "CMMD[random-conv]", "precision-recall[random-conv]"]
    for row in rows:
        assert (row["n"], row["n_reference"], row["fingerprint"]) == (12, 14, extractor.fingerprint)
        assert (
            len(row["problems"]) == 2 and "2.png" in row["problems"][0] and "different counts: 12" in row["problems"][1]
        )
    assert rows[0]["value"] == kid.from_features(x, y, 3, 10)[0]
    assert rows[1]["value"] == cmmd.from_features(x, y)
    assert rows[2]["precision"] == precision_recall.from_features(x, y)["precision"]
    score = inception_score.from_folder(b, extractor, splits=2)
    assert score["name"] == "IS[random-conv]" and score["n"] == 14
    assert score["value"] == inception_score.from_logits(y, 2)[0]
