"""The next-scale painter: its folder and classes; refiner, drafter and budget by name; the bench; its recipe."""

import json
import sys

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from tests.doubles import one_sentence
from visspec import ImagePipeline
from visspec.api import presets, zoo
from visspec.api.loading import load_image_model
from visspec.cli import bench_image
from visspec.cli.main import main
from visspec.models.scales.kv_budget import CacheBudget, selectivity
from visspec.models.scales.multiscale import MultiScaleShape, MultiScaleVAE
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.images import LabelledVARImages, calibrate_budget
from visspec.models.var.layout import save_vae
from visspec.models.var.model import VARImageConfig, VARImageModel, load
from visspec.toys.recipes import animals, scale_codes, scale_draw, scale_painter
from visspec.toys.recipes.any_order_painter import included_vq
from visspec.toys.recipes.captioner_build import save
from visspec.toys.recipes.painter_score import draw_pictures
from visspec.toys.recipes.recipe import write_coded
from visspec.toys.scenes import scenes_of
from visspec.toys.world.suite import suite

SIDES = (1, 2, 3, 4)
LABELS = ["a photo of a red ring", "a photo of a star", "a photo of a blue cross", "a photo of a bar"]
PROMPTS = LABELS[:2]
SHIPPED = zoo.CHECKPOINTS / "painter-var" / "config.json"
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
    save(pipe.model, None, folder / "painter", torch.float32)
    save(fresh(1, depth=1), None, folder / "small", torch.float32)
    for name in ("painter", "small"):
        GenerationConfig(guidance_scale=2.0).save_pretrained(folder / name)
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
        with one_sentence(f"^{name}: got .*expected"):
            pipe(**{"prompt": "1"} | {name: text})


# --- a refiner, a drafter, a budget -----------------------------------------------------------------------------------


def test_a_painter_is_a_refiner(pipe):
    small = fresh(1, depth=1)
    alone = ImagePipeline(small, None)
    for handover, same in ((4, pipe), (0, alone)):
        found = pipe.with_parts({"refiner": small, "handover": handover})(PROMPTS, seed=[1, 2], output_type="latent")
        assert found.stats[0].guarantee == "exact for the declared target"
        for own, theirs in zip(found.tokens, same(PROMPTS, seed=[1, 2], output_type="latent").tokens):
            assert torch.equal(own, theirs)
    assert pipe.with_parts({}) is pipe and not pipe.parts
    assert pipe.with_parts({"ramp": "linear"}).with_parts({"ramp": "constant"}).parts == {"ramp": "constant"}


@pytest.mark.parametrize("parts, said", [
    ({"refiner": "../painter", "handover": 2}, "refiner: got '../painter', expected a model or the name"),
    ({"refiner": "captioner/../painter", "handover": 2}, "refiner: got 'captioner/../painter', expected"),
    ({"refiner": "nobody", "handover": 2}, "refiner: got 'nobody', expected a model or the name of an included"),
    ({"refiner": "captioner", "handover": 2}, "model_type: got "),
    ({"refiner": fresh(1)}, "handover: got None, expected a refiner and its first scale's number"),
    ({"refiner": fresh(1), "handover": 5}, r"handover: got 5, expected 0\.\.4"),
    ({"refiner": fresh(1, sides=(1, 2, 4)), "handover": 2}, "refiner: got scales"),
    ({"refiner": fresh(1, labels=LABELS[:2]), "handover": 2}, "refiner: got classes 2, expected 4"),
    ({"refiner": fresh(1, codebook=8), "handover": 2}, "refiner: got a model with another codebook, expected"),
    ({"refiner": fresh(1), "handover": 2, "budget": 0.5}, "budget: got one beside a refiner"),
    ({"budget": 0.0}, r"budget: got 0\.0, expected a share in \(0, 1\]"),
    ({"budget": 1.5}, r"budget: got 1\.5, expected a share"),
    ({"budget": float("nan")}, "budget: got nan, expected a share"),
    ({"budget": True}, "budget: got True, expected a `Budget` or the share"),
    ({"budget": "0.1"}, "budget: got '0.1', expected a `Budget` or the share"),
    ({"budget": CacheBudget(((1, 5, 14),) * 3)}, "budget: got 3 layers"),
    ({"ramp": "steep"}, "ramp: got 'steep'"),
])  # fmt: skip
def test_wrong_parts_are_refused_before_work_starts(pipe, parts, said):
    with one_sentence(said):
        pipe.with_parts(parts)


def test_a_share_is_a_budget_by_measured_selectivity(pipe):
    net, quantize = pipe.model.var, pipe.model.autoencoder.quantize
    said = selectivity(net, quantize, torch.arange(4), torch.Generator().manual_seed(0))
    for share, window in ((0.3, 4), (0.1, 1)):
        wanted = CacheBudget.allot(said, net.config.scales, share, window)
        assert calibrate_budget(pipe.model, share) == wanted == LabelledVARImages(pipe.model, budget=share).budget
    whole = pipe.with_parts({"budget": 1})
    out, plain = (p(PROMPTS, seed=[1, 2], output_type="latent") for p in (whole, pipe))
    assert whole.family.budget.whole(net.config.scales) and out.stats[0].guarantee == "exact"
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens))
    small = pipe.with_parts({"budget": 0.3})(PROMPTS, seed=[1, 2], output_type="latent")
    assert small.stats[0].guarantee == "approximate"
    assert small.traces[0].memory["cache"] < out.traces[0].memory["cache"]


@pytest.mark.parametrize("rule", ["scales", "repaired"])
def test_a_painters_folder_is_a_drafter(pipe, written, rule):
    drafter, name = zoo.drafter(str(written / "painter"), pipe.model)
    assert isinstance(drafter, SmallVAR) and name == "painter"
    out = pipe(PROMPTS, seed=[1, 2], drafter=str(written / "painter"), acceptance=rule, output_type="latent")
    assert out.stats[0].guarantee == "exact" and out.traces[0].faults == 0
    assert int(out.passes[0].max()) + 1 < 4, "the model itself drafts: all scales of a round are its own"
    if rule == "scales":
        plain = pipe(PROMPTS, seed=[1, 2], output_type="latent")
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens))


def test_a_drafter_of_other_codes_is_refused(pipe, tmp_path):
    save(fresh(1, codebook=8), None, tmp_path, torch.float32)
    with one_sentence(r"^drafter: got a model with another codebook, expected the model's 64"):
        pipe(PROMPTS[0], drafter=str(tmp_path))


# --- the bench --------------------------------------------------------------------------------------------------------


def test_presets_of_scales():
    names = {"plain", "scales", "repaired", "code", "scalekv", "fastvar"}
    assert set(presets.MAPS) == names
    assert zoo.preset("code", "maps").parts["refiner"] == "var"
    with pytest.raises(ValueError, match="preset: got 'gumbel', expected one of plain, scales"):
        zoo.preset("gumbel", "maps")


def test_other_targets_are_rows_of_the_bench(pipe):
    others = bench_image.other_targets(pipe, ["plain", "scalekv"])
    assert list(others) == ["scalekv"]
    others = {
        "half": pipe.with_parts({"budget": 0.5}),
        "two": pipe.with_parts({"refiner": fresh(1, depth=1), "handover": 2}),
    }
    record = bench_image.bench(pipe, PROMPTS, {}, {"temperature": 1.0}, warmup=1, others=others)
    rows = {row["name"]: row for row in record["rows"]}
    assert record["stock"] is None and not record["failures"]
    assert rows["plain"]["guarantee"] == "exact" and rows["plain"]["nfe"] == 4 == rows["two"]["nfe"]
    assert rows["half"]["guarantee"] == "approximate" and rows["two"]["guarantee"].startswith("exact for")
    assert rows["half"]["cache_bytes"] < rows["plain"]["cache_bytes"] > rows["two"]["cache_bytes"] > 0


def test_a_painter_of_classes_is_asked_for_its_classes(pipe):
    assert bench_image.taught(pipe.family, suite()) is None, "no task is all of its four"
    model, rows = fresh(labels=animals.LABELS), animals.rows()
    assert len(rows) == 48 and bench_image.taught(LabelledVARImages(model), rows) == ["single_object"]
    assert scenes_of(None, model, "prompts").prompts() == rows
    assert scenes_of(None, pipe.model, "prompts").name == "shapes"


# --- the recipe -------------------------------------------------------------------------------------------------------


def test_pictures_are_of_their_classes():
    assert len(animals.LABELS) == 156 == len(set(animals.LABELS))
    for seed in range(20):
        number, scene = animals.pair(seed)
        (animal,), row = scene.things, animals.ROWS[number]
        assert animal.name == row["include"][0]["class"] and scene.ground in ("smooth", "cloudy")
        assert [scene.ground, scene.tint] == row.get("ground", [scene.ground, scene.tint])


def test_classes_are_sums_of_facts():
    table = animals.facts()
    assert table.shape == (157, 21) and set(table.sum(1).tolist()) == {1.0, 3.0}
    pig, on_blue = (table[animals.LABELS.index(f"a photo of a pig{on}")] for on in ("", " on a cloudy blue ground"))
    assert (on_blue - pig).sum() == 2 and (on_blue - pig).min() == 0 and not (table[:156] @ table[156]).any()


def test_weights_are_by_map():
    every = scale_draw.weights(8)
    parts = [part.sum().item() for part in every.split(scale_codes.SCALES.sizes)]
    assert abs(sum(parts) - 1) < 1e-6 and abs(parts[7] / parts[0] - 8) < 1e-4
    late = [part.sum().item() for part in scale_draw.weights(8, 3.0).split(scale_codes.SCALES.sizes)]
    assert abs(late[7] / late[5] - 3 * 8 / 6) < 1e-4 and abs(late[6] / late[5] - 3 * 7 / 6) < 1e-4
    assert len(scale_draw.weights(6)) == 91


@pytest.fixture(scope="module")
def codec():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MultiScaleVAE(MultiScaleShape(32, 8, 32, (1, 1, 1, 1), 0)).eval()


def made_up(folder, pairs):
    """Codes of pairs, of no picture."""
    generator = torch.Generator().manual_seed(5)
    classes, codes = (
        torch.randint(len(animals.LABELS), (pairs,), generator=generator),
        torch.randint(32, (pairs, scale_codes.SCALES.total), generator=generator),
    )
    torch.save({"classes": classes.short(), "codes": codes.short()}, folder / "codes.pt")


def tiny(codec, name="painter", seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return scale_draw.SharedClassEmbedding(scale_draw.build(name, codec, {"width": 32, "depth": 2, "heads": 2}))


@pytest.mark.parametrize("maps", [8, 6, 1])
def test_a_whole_picture_is_taught_as_it_is_drawn(codec, maps):
    """Laws of one pass are those that the pipeline's reading gives scale by scale."""
    taught = tiny(codec)
    for weight in taught.net.parameters():
        weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    classes, generator = torch.tensor([3, len(animals.LABELS)]), torch.Generator().manual_seed(1)
    codes = torch.randint(32, (2, scale_codes.SCALES.total), generator=generator)
    with torch.no_grad():
        read = scale_draw.inputs(codec.quantize, codes)
        logits = taught.logits(classes, read, maps)
    wanted = torch.cat(scale_painter.laws(taught.fold_classes(), classes, codes)[:maps], dim=1)
    torch.testing.assert_close(logits.log_softmax(-1), wanted, atol=2e-5, rtol=1e-4)


def test_distances_by_scale(codec):
    model, other = (tiny(codec, seed=seed).fold_classes().eval() for seed in (0, 0))
    out = draw_pictures(ImagePipeline(model, None), animals.LABELS[:2], 1.0, 0, 2)
    same = scale_painter.apart(model, other, out)
    assert same["kl"] == same["tv"] == [0.0] * 8 and min(same["entropy"]) > 0
    with torch.no_grad():
        other.var.head.bias.add_(torch.randn(32, generator=torch.Generator().manual_seed(2)))
    apart = scale_painter.apart(model, other, out)
    assert min(apart["kl"]) > 0 and 0 < min(apart["tv"]) and max(apart["tv"]) < 1
    tight = CacheBudget.full(scale_codes.SCALES, 2)
    assert scale_painter.apart(model, model, out, tight)["kl"] == [0.0] * 8
    assert scale_painter.likeness(out, out) == {"psnr": 60.0, "equal": 2}


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_detected")
def test_the_recipe_on_a_few_steps(tmp_path, monkeypatch, codec):
    """Every stage, taken up where it stopped, and the folders that come of it."""
    sizes = {"painter": {"width": 32, "depth": 2, "heads": 2}, "small": {"width": 32, "depth": 1, "heads": 2}}
    monkeypatch.setattr(scale_draw, "SIZES", sizes)
    monkeypatch.setattr(scale_painter, "HANDOVERS", (6,))
    monkeypatch.setattr(scale_painter, "DEPTHS", (1,))
    monkeypatch.setattr(scale_painter, "GUIDANCES", (1.0, 2.0))
    save_vae(tmp_path / "vq", codec, scale_codes.SCALES)
    torch.save({"step": 1, "seconds": 60.0, "loss": 1.0}, tmp_path / "quantiser.pt")
    options = scale_painter.PAINTER.parse([
        "--out", str(tmp_path), "--pairs", "32", "--steps", "2", "--small-steps", "2", "--refine-steps", "2", "--rows",
        "4", "--every", "1", "--every-prompt", "24", "--resume",
    ])  # fmt: skip
    made_up(tmp_path, 32)
    for stage in (scale_draw.ScaleStage, scale_draw.SmallStage, scale_draw.RefineStage):
        halfway = stage(options, 0)
        halfway.steps = 1
        halfway.run()
        made = stage(options, 0)
        made.restore()
        assert made.step == 1
        made.run()
    taught = scale_draw.SharedClassEmbedding(scale_draw.build("small", codec))
    scale_draw.load_stage(taught, tmp_path / "refined.pt")
    scale_painter.finish(options)
    model, _ = load_image_model(str(tmp_path / "painter-var"))
    small = load(tmp_path / "painter-var-small")
    for one in (model, small):
        own = one.autoencoder.decoder.conv_in.weight
        torch.testing.assert_close(own, codec.decoder.conv_in.weight, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(
        small.var.class_emb.weight, taught.fold_classes().var.class_emb.weight, atol=1e-3, rtol=1e-2
    )
    record = json.loads((tmp_path / "painter-var" / "provenance.json").read_text())
    rows = record["measured"]["rows"]
    assert rows["scales, 1 drafted"]["equal"] == rows["plain"]["n"] and rows["plain"]["fd_ratio"] == 1.0
    assert rows["code, 6"]["cache_bytes"] < rows["plain"]["cache_bytes"]
    kept = rows["scalekv, 0.1"]
    assert kept["cache_bytes"] <= kept["budget_bytes"]
    assert "| code, 6 |" in (tmp_path / "painter-var" / "README.md").read_text()
    assert "painter-var-small" in (tmp_path / "painter-var-small" / "README.md").read_text()


def test_distillation_ends_where_the_laws_are_equal(tmp_path, monkeypatch, codec):
    """Its loss is a divergence: zero for a small model that is the large one, and positive for another."""
    size = {"width": 32, "depth": 1, "heads": 2}
    monkeypatch.setattr(scale_draw, "SIZES", {"painter": size, "small": size})
    save_vae(tmp_path / "vq", codec, scale_codes.SCALES)
    options = scale_painter.PAINTER.parse(["--out", str(tmp_path), "--pairs", "8", "--rows", "4"])
    made_up(tmp_path, 8)
    stage = scale_draw.SmallStage(options, 0)
    for name in ("small.pt", "painter.pt"):
        stage.file = tmp_path / name
        stage.checkpoint(0.0)
    same = scale_draw.RefineStage(options, 0)
    assert abs(same.loss().item()) < 1e-6
    with torch.no_grad():
        same.taught.net.head.bias.add_(torch.randn(32, generator=torch.Generator().manual_seed(2)))
    assert same.loss().item() > 0.01


def test_the_painters_autoencoder_is_borrowed_whole():
    """What VAR's class encodes and decodes is what the stock VQ model does, but for lengths and the border."""
    vq, model = included_vq(), scale_codes.multi_scale_of(32)
    true = animals.held_out(animals.rows(24))
    with torch.no_grad():
        wanted = vq.quant_conv(vq.encoder(true))
        features = model.quant_conv(model.encoder(true))
        torch.testing.assert_close(features * scale_codes.LENGTH, wanted, atol=1e-4, rtol=1e-4)
        whole = vq.decoder.conv_in(vq.post_quant_conv(features))
        mine = model.decoder.conv_in(model.post_quant_conv(features))
    torch.testing.assert_close(mine[..., 1:-1, 1:-1], whole[..., 1:-1, 1:-1], atol=1e-4, rtol=1e-4)
    assert model.factor == 8 and not any(p.requires_grad for p in model.parameters())


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    options = scale_painter.PAINTER.parse([
        "--out", str(folder), "--pairs", "12", "--vq-steps", "4", "--vq-rows", "4", "--rows", "4",
        "--every-prompt", "48", "--resume",
    ])  # fmt: skip
    write_coded(scale_codes.feature_coders, options)
    return options


def test_the_quantiser_alone_is_taught(features):
    stage = scale_codes.QuantiserStage(features, 0)
    before = {name: value.clone() for name, value in stage.model.state_dict().items()}
    with torch.no_grad():
        first = stage.loss().item()
    stage.run()
    changed = {name for name, value in stage.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("quantize.") for name in changed)
    assert stage.loss().item() < first
    codec = scale_codes.load_vq(features.out)
    assert torch.equal(codec.quantize.embedding.weight, stage.model.quantize.embedding.weight)
    write_coded(scale_codes.code_coders, features, keep=False)
    data = torch.load(features.out / "codes.pt", weights_only=True)
    found = animals.pair(scale_codes.FIRST + 3)
    assert int(data["classes"][3]) == found[0]
    codes = codec.encode(animals.pixels([found[1]]), scale_codes.SCALES)
    assert (codes[0] == data["codes"][3]).float().mean() > 0.95, "but for features kept in float16"


def test_codes_start_again_where_something_is_lacking(features):
    stage = scale_codes.QuantiserStage(features, 0)
    ground = torch.zeros(1, 50, 8)
    ground[0, 7] = 3.0
    stage.step, stage.used = 1, torch.ones(scale_codes.CODES, dtype=torch.bool)
    stage.used[:5] = False
    kept = stage.model.quantize.embedding.weight[5:].clone()
    stage.restart([ground])
    weight = stage.model.quantize.embedding.weight
    assert (weight[:5] == 3.0).all() and torch.equal(weight[5:], kept) and not stage.used.any()


# --- the shipped pair -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def included():
    return ImagePipeline.from_pretrained("painter-var")


@shipped
def test_the_shipped_pair_is_small_and_says_where_it_is_from(included):
    folders = [zoo.CHECKPOINTS / name for name in ("painter-var", "painter-var-small")]
    assert sum((folder / "model.safetensors").stat().st_size for folder in folders) < 12e6
    for folder in folders:
        record = json.loads((folder / "provenance.json").read_text())
        assert record["weights"]["bytes"] == (folder / "model.safetensors").stat().st_size
        assert record["recipe"] == "visspec.toys painter-var" and "painter-var" in (folder / "README.md").read_text()


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
    whole = zoo.preset("code", "maps", included.model).parts | {"handover": 8}
    assert whole["refiner"] == "painter-var-small"
    for parts, same in ((whole, True), (zoo.preset("code", "maps").parts, False)):
        out = included.with_parts(parts)(texts, **options)
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, plain.tokens)) == same
        assert out.stats[0].guarantee == "exact for the declared target"
        most = out.traces[0].memory["cache"] / plain.traces[0].memory["cache"]
        assert (most <= 1) if same else (most < 0.5), "the cache of a composition is half at most"
    kept = included.with_parts({"budget": 0.1})(texts, **options)
    budget = LabelledVARImages(included.model, budget=0.1).budget
    assert kept.stats[0].guarantee == "approximate"
    assert kept.traces[0].memory["cache"] <= max(budget.bytes(included.model.var, 4))
    assert max(sum(row) for row in zip(*budget.tokens)) <= 6 * 23


@shipped
def test_presets_of_scales_on_the_command_line(included, tmp_path, capsys):
    labels = included.family.labels
    for preset in ("code", "scalekv", "fastvar", "repaired"):
        command = ["generate", labels[0], "--model", "painter-var", "--preset", preset, "--seed", "1"]
        assert main([*command, "--out", str(tmp_path / preset)]) == 0
        assert len(list((tmp_path / preset).glob("*.png"))) == 1
    assert main(["generate", "a red", "--model", "painter-var", "--out", str(tmp_path)]) != 0
    assert f"prompt: got 'a red', expected one of the {len(labels)} classes" in capsys.readouterr().err


@shipped
def test_the_bench_of_the_shipped_pair(included, tmp_path, monkeypatch):
    file = tmp_path / "record.json"
    command = ["bench", "image", "--model", "painter-var", "--count", "1", "--quality", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["visspec", *command])
    assert main([*command, "--method", "plain", "--method", "code", "--method", "repaired"]) == 0
    record = json.loads(file.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["plain", "repaired", "code"]
    for row in rows.values():
        assert row["cache_bytes"] > 0 and row["fd"] > 0 and row["fd_ratio"] > 0 and row["quality_n"] == 2
    assert rows["plain"]["fd_ratio"] == 1.0
