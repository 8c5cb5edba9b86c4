"""The next-scale painter: its folder and classes; refiner, drafter and budget by name; the bench."""

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from tests.doubles import raises_line
from visspec import ImagePipeline, registry
from visspec.cli import bench_image
from visspec.cli.main import main
from visspec.io import included as held_out
from visspec.models.scales.kv_budget import CacheBudget, selectivity
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.layout import VARImageConfig, VARImageModel
from visspec.models.var.target import VARImages, calibrate_budget

SIDES = (1, 2, 3, 4)
LABELS = ["a photo of a red ring", "a photo of a star", "a photo of a blue cross", "a photo of a bar"]
PROMPTS = LABELS[:2]
SHIPPED = registry.CHECKPOINTS / "painter-var" / "config.json"
shipped = pytest.mark.skipif(not SHIPPED.is_file(), reason="the shipped painter is not in this checkout")


def fresh(seed=0, sides=SIDES, depth=2, scale=0.25, labels=LABELS, codebook=None):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        grids = [[side, side] for side in sides]
        model = VARImageModel(VARImageConfig({"width": 32, "depth": depth, "heads": 2}, grids, labels)).eval()
        torch.manual_seed(7 if codebook is None else codebook)
        nn.init.normal_(model.autoencoder.quantize.embedding.weight)
        for part in model.autoencoder.quantize.quant_resi.parameters():
            part.data.normal_(0, 0.1)
        torch.manual_seed(seed)
        for weight in model.var.parameters():
            weight.data.normal_(0, scale)
    model.generation_config = GenerationConfig(guidance_scale=2.0)
    return model


@pytest.fixture(scope="module")
def pipe():
    with torch.inference_mode(False):
        return ImagePipeline(fresh(), None)


@pytest.fixture(scope="module")
def written(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scales")
    pipe.model.save_pretrained(folder / "painter")
    fresh(1, depth=1).save_pretrained(folder / "small")
    return folder


# --- the folder and its classes ---------------------------------------------------------------------------------------


def test_prompts_are_names_of_classes(pipe):
    out = pipe([PROMPTS[1], "1"], seed=[3, 3], output_type="latent")
    assert torch.equal(out.tokens[0], out.tokens[1]) and out.tokens[0].shape == (30,)
    assert pipe.family.default_guidance == 2.0 and pipe.family.labels == tuple(LABELS)
    named = pipe(PROMPTS[1], seed=3, output_type="latent", negative_prompt=LABELS[2]).tokens[0]
    assert torch.equal(named, pipe("1", seed=3, output_type="latent", negative_prompt="2").tokens[0])
    assert not torch.equal(named, out.tokens[0])
    assert torch.equal(pipe("1", seed=3, output_type="latent", negative_prompt="").tokens[0], out.tokens[0])
    for name, text in (("prompt", "a photo of a dog"), ("prompt", "4"), ("prompt", ""), ("negative_prompt", "a dog")):
        with raises_line(f"^{name}: got .*expected"):
            pipe(**{"prompt": "1"} | {name: text})


# --- a refiner, a drafter, a budget -----------------------------------------------------------------------------------


def test_a_painter_is_a_refiner(pipe):
    small = fresh(1, depth=1)
    alone = ImagePipeline(small, None)
    for handover, same in ((4, pipe), (0, alone)):
        result = pipe.with_parts({"refiner": small, "handover": handover})(PROMPTS, seed=[1, 2], output_type="latent")
        assert result.stats[0].guarantee == "exact for the declared target"
        for own, theirs in zip(result.tokens, same(PROMPTS, seed=[1, 2], output_type="latent").tokens):
            assert torch.equal(own, theirs)
    mixed = pipe.with_parts({"refiner": small, "handover": 2})(PROMPTS, seed=[1, 2], output_type="latent")
    declared = "scales 1..2 by the model, the others of 4 by the refiner, each given all before"
    assert mixed.stats[0].declared == declared and declared in str(mixed.stats[0])
    for own, theirs in zip(mixed.tokens, pipe(PROMPTS, seed=[1, 2], output_type="latent").tokens):
        assert torch.equal(own[:5], theirs[:5]) and not torch.equal(own, theirs)
    assert pipe.with_parts({}) is pipe and not pipe.parts
    assert pipe.with_parts({"ramp": "linear"}).with_parts({"ramp": "constant"}).parts == {"ramp": "constant"}


@pytest.mark.parametrize("parts, said", [
    ({"refiner": "../painter", "handover": 2}, "refiner: got '../painter', expected a model or the name"),
    ({"refiner": "captioner/../painter", "handover": 2}, "refiner: got 'captioner/../painter', expected"),
    ({"refiner": "nobody", "handover": 2}, "refiner: got 'nobody', expected a model or the name of an included"),
    ({"refiner": "captioner", "handover": 2}, "model_type: got "),
    ({"refiner": fresh(1, labels=LABELS[:2]), "handover": 2}, "refiner: got classes 2, expected 4"),
    ({"refiner": fresh(1, codebook=8), "handover": 2}, "refiner: got a model with another codebook, expected"),
    ({"budget": 0.0}, r"budget: got 0\.0, expected a share in \(0, 1\]"),
    ({"budget": 1.5}, r"budget: got 1\.5, expected a share"),
    ({"budget": float("nan")}, "budget: got nan, expected a share"),
])  # fmt: skip
def test_wrong_parts_refused(pipe, parts, said):
    with raises_line(said):
        pipe.with_parts(parts)


def test_share_is_budget(pipe):
    net, quantize = pipe.model.var, pipe.model.autoencoder.quantize
    message = selectivity(net, quantize, torch.arange(4), torch.Generator().manual_seed(0))
    for share, window in ((0.3, 4), (0.1, 1)):
        expected = CacheBudget.allot(message, net.config.scales, share, window)
        assert calibrate_budget(pipe.model, share) == expected == VARImages(pipe.model, budget=share).budget
    whole = pipe.with_parts({"budget": 1})
    out, plain = (p(PROMPTS, seed=[1, 2], output_type="latent") for p in (whole, pipe))
    assert whole.family.budget.whole(net.config.scales) and out.stats[0].guarantee == "exact"
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens))
    small = pipe.with_parts({"budget": 0.3})(PROMPTS, seed=[1, 2], output_type="latent")
    assert small.stats[0].guarantee == "approximate" and "part of its cache" in str(small.stats[0])
    assert small.traces[0].memory["cache"] < out.traces[0].memory["cache"]


@pytest.mark.parametrize("rule", ["scales", "repaired"])
def test_a_painters_folder_is_a_drafter(pipe, written, rule):
    drafter, name = registry.drafter(str(written / "painter"), pipe.model)
    assert isinstance(drafter, SmallVAR) and name == "painter"
    out = pipe(PROMPTS, seed=[1, 2], drafter=str(written / "painter"), acceptance=rule, output_type="latent")
    assert out.stats[0].guarantee == "exact" and out.traces[0].faults == 0
    assert int(out.passes[0].max()) + 1 < 4, "the model itself drafts: all scales of a round are its own"
    if rule == "scales":
        plain = pipe(PROMPTS, seed=[1, 2], output_type="latent")
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens))


def test_a_drafter_of_other_codes_is_refused(pipe, tmp_path):
    fresh(1, codebook=8).save_pretrained(tmp_path)
    with raises_line(r"^drafter: got a model with another codebook, expected the model's 64"):
        pipe(PROMPTS[0], drafter=str(tmp_path))


# --- the bench --------------------------------------------------------------------------------------------------------


def test_other_targets_are_rows_of_the_bench(pipe):
    others = bench_image.other_targets(pipe, ["plain", "scalekv"])
    assert list(others) == ["scalekv"]
    two = {"refiner": fresh(1, depth=1), "handover": 2}
    others = {"half": pipe.with_parts({"budget": 0.5}), "two": pipe.with_parts(two)}
    record = bench_image.bench(pipe, PROMPTS, {}, {"temperature": 1.0}, warmup=1, others=others)
    rows = {row["name"]: row for row in record["rows"]}
    assert record["stock"] is None and not record["failures"]
    assert rows["plain"]["guarantee"] == "exact" and rows["plain"]["nfe"] == 4 == rows["two"]["nfe"]
    assert rows["half"]["guarantee"] == "approximate" and rows["two"]["guarantee"].startswith("exact for")
    assert rows["half"]["cache_bytes"] < rows["plain"]["cache_bytes"] > rows["two"]["cache_bytes"] > 0


def test_prompts_of_classes(pipe):
    assert bench_image.taught(pipe.family, held_out.scenes("shapes").prompts()) is None, "no task is all of its four"
    rows = held_out.scenes("animals").prompts()
    model = fresh(labels=[row["prompt"] for row in rows])
    assert len(rows) == 48 and bench_image.taught(VARImages(model), rows) == ["single_object"]
    assert held_out.scenes(None, model, "prompts").prompts() == rows
    assert held_out.scenes(None, pipe.model, "prompts").name == "shapes"


# --- the shipped pair -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def included():
    return ImagePipeline.from_pretrained("painter-var")


@shipped
def test_the_shipped_pair_draws_in_every_way(included):
    texts = list(included.family.labels[:2])
    options = {"seed": [1, 2], "output_type": "latent"}
    plain = included(texts, **options)
    assert plain.tokens[0].shape == (included.model.var.config.scales.total,) and plain.stats[0].guarantee == "exact"
    drafted = included(texts, drafter="painter-var-small", **options)
    assert all(torch.equal(a, b) for a, b in zip(drafted.tokens, plain.tokens)) and drafted.traces[0].faults == 0
    repaired = included(texts, drafter="painter-var-small", acceptance="repaired", **options)
    assert repaired.stats[0].guarantee == "exact" and repaired.traces[0].faults == 0
    whole = registry.preset("code", "maps").parts | {"handover": 8}
    assert whole["refiner"] == "var"
    for parts, same in ((whole, True), (registry.preset("code", "maps").parts, False)):
        out = included.with_parts(parts)(texts, **options)
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens)) == same
        assert out.stats[0].guarantee == "exact for the declared target"
        most = out.traces[0].memory["cache"] / plain.traces[0].memory["cache"]
        assert (most <= 1) if same else (most < 0.5), "the cache of a composition is half at most"
    kept = included.with_parts({"budget": 0.1})(texts, **options)
    budget = VARImages(included.model, budget=0.1).budget
    assert kept.stats[0].guarantee == "approximate"
    var, most = included.model.var, max(map(sum, zip(*budget.tokens)))
    assert kept.traces[0].memory["cache"] <= 2 * var.config.width * 4 * var.pos_start.element_size() * most  # four rows
    assert most <= 6 * 23


@shipped
def test_scale_presets_on_command_line(included, tmp_path, capsys):
    labels = included.family.labels
    for preset in ("code", "scalekv", "repaired"):
        command = ["generate", labels[0], "--model", "painter-var", "--preset", preset, "--seed", "1"]
        assert main([*command, "--out", str(tmp_path / preset)]) == 0
        assert len(list((tmp_path / preset).glob("*.png"))) == 1
    assert main(["generate", "a red", "--model", "painter-var", "--out", str(tmp_path)]) != 0
    assert f"prompt: got 'a red', expected one of the {len(labels)} classes" in capsys.readouterr().err
