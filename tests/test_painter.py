"""The embedded painter: its parts, its recipe on a few steps, and the shipped weights."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusProcessor,
    JanusVQVAE,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests import children
from visspec.api import zoo
from visspec.toys.recipes import (
    captioner,
    painter,
    painter_build,
    painter_data,
    painter_draw,
    painter_score,
)
from visspec.toys.recipes.painter_vq import Codebook, compose_codes, latents, nearest
from visspec.toys.world.palette import CLASSES, COLOURS
from visspec.toys.world.scene import HELD_OUT_SEED, Scene, Shape
from visspec.toys.world.suite import parse, suite, vocabulary
from visspec.toys.world.worlds import world

SHIPPED = [(low, zoo.CHECKPOINTS / ("painter-lowres" if low else "painter")) for low in (False, True)]
unshipped = pytest.mark.skipif(
    not all((folder / "model.safetensors").exists() for _, folder in SHIPPED), reason="no painter weights in the zoo"
)
LIMIT = {False: 18e6, True: 6e6}  # bytes of the weights


@pytest.mark.parametrize("low", [False, True])
def test_configuration_has_the_stock_geometry(low):
    config = painter_build.model_config(low)
    side = 6 if low else 12
    assert config.vq_config.num_patches == side
    assert config.vision_config.num_image_tokens == side * side
    assert config.vision_config.image_size == side * painter_build.PATCH == painter_data.SIDE[low]
    assert painter_build.generation_config(low).max_length >= painter_build.PROMPT + side * side


def test_tokenizer_and_processor_round_trip(tmp_path):
    painter_build.build_processor().save_pretrained(tmp_path)
    processor = JanusProcessor.from_pretrained(tmp_path)
    prompts = [row["prompt"] for row in suite()]
    ids = processor(text=prompts, generation_mode="image", return_tensors="pt", padding=True)["input_ids"]
    assert torch.equal(ids, painter_build.prompt_ids(painter_build.build_tokenizer(), prompts))
    assert (ids[:, -1] == processor.tokenizer.convert_tokens_to_ids(painter_build.BOI)).all()
    assert processor.tokenizer.unk_token_id not in ids
    assert set(vocabulary()) <= set(processor.tokenizer.get_vocab())
    assert processor.tokenizer.batch_decode(ids, skip_special_tokens=True) == prompts


def test_the_unconditional_form_keeps_only_bos_and_image_start():
    tokenizer = painter_build.build_tokenizer()
    ids = painter_build.prompt_ids(tokenizer, ["a photo of a ring"])
    bare = painter_build.without_words(tokenizer, ids)
    kept = [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(painter_build.BOI)]
    assert bare[bare != tokenizer.pad_token_id].tolist() == kept
    assert torch.equal(bare != tokenizer.pad_token_id, (ids == kept[0]) | (ids == kept[1]))


def test_stock_encoder_agrees_with_the_nearest_unit_code():
    vq = JanusVQVAE(painter_build.vq_config(True)).eval()
    Codebook(vq, 1)
    pictures = painter_data.pixels([painter_data.pair(i)[1] for i in range(2)], 48)
    with torch.no_grad():
        assert torch.equal(nearest(vq, latents(vq, pictures)).flatten(), vq.encode(pictures).image_tokens)


@pytest.mark.parametrize("low", [False, True])
def test_a_patch_has_one_code_wherever_it_stands(low):
    """Ground and shapes are coded apart: what stands elsewhere changes nothing, and a shift by patches shifts codes."""
    vq, side = JanusVQVAE(painter_build.vq_config(low)).eval(), painter_build.grid(low)
    Codebook(vq, 1)
    step = painter_build.PATCH / painter_data.SIDE[low]
    at = [Shape("ring", "red", 0.3, 0.35, 0.14), Shape("ring", "red", 0.3 + step, 0.35, 0.14)]
    other = Shape("bar", "blue", 0.7, 0.75, 0.13)
    scenes = [Scene(()), Scene((at[0],)), Scene((at[0], other)), Scene((at[1],))]
    codes, ink = compose_codes(vq, scenes, low)
    assert codes.shape == ink.shape == (4, side, side)
    assert len(codes[0].unique()) == 1 and not ink[0].any()
    assert (codes[~ink] == codes[0, 0, 0]).all()
    assert torch.equal(codes[2][ink[1]], codes[1][ink[1]]) and ink[2].sum() > ink[1].sum()
    assert torch.equal(ink[3, :, 1:], ink[1, :, :-1])
    if not low:  # a window moves with its shape; at low resolution it is the whole picture
        assert torch.equal(codes[3, :, 1:], codes[1, :, :-1])


def test_settled_scenes_stand_on_the_grid_and_keep_apart():
    for seed in range(40):
        scene = painter_data.pair(seed)[1]
        assert scene.ground in painter_data.GROUNDS_DRAWN and 0 <= scene.texture_seed < painter_data.TEXTURES
        assert all(shape.radius in painter_data.RADII for shape in scene.things)
        places = [at / painter_data.STEP for shape in scene.things for at in (shape.x, shape.y)]
        assert places == pytest.approx([round(place) for place in places])
    close = Scene((Shape("ring", "red", 0.3, 0.3, 0.13), Shape("bar", "red", 0.5, 0.3, 0.13)))
    assert painter_data.snap_to_grid(close) is None
    assert painter_data.snap_to_grid(Scene((Shape("ring", "red", 0.1, 0.5, 0.13),))) is None  # over the edge


def test_progress_says_what_has_been_begun():
    metadata = parse("a photo of a red bar and a blue ring")
    scene = Scene((Shape("ring", "blue", 6 / 12, 3 / 12, 13 / 96), Shape("bar", "red", 4 / 12, 9 / 12, 13 / 96)))
    shown = np.zeros((12, 12), bool)
    shown[2:5, 5:7], shown[8:10, 2:6] = True, True
    begun = painter_draw.progress(metadata, scene, shown)
    ring, bar = 12 * 2 + 5, 12 * 8 + 2  # the first codes that show them
    assert begun.shape == (144, 7)
    assert begun[:, 1].argmax() == ring + 1 and begun[:, 0].argmax() == bar + 1  # the prompt's order, not the picture's
    assert begun[[ring, ring + 1, bar + 1, 143], 2].tolist() == [0, 1, 2, 2]
    kinds, colours = ([0, *(1 + list(names).index(name) for name in asked)] for names, asked in (
        (CLASSES, ("ring", "bar")), (COLOURS, ("blue", "red"))))  # fmt: skip
    following = [[kinds[i], colours[i]] for i in (1, 2, 2, 0)]
    assert begun[[ring, ring + 1, bar, bar + 1], 3:5].tolist() == following
    assert begun[[ring, ring + 1, bar, bar + 1], 5:].tolist() == [[kinds[i], colours[i]] for i in (0, 1, 1, 2)]


def test_reading_counts_what_a_prompt_says_only_where_there_is_one():
    tokenizer = painter_build.build_tokenizer()
    reading = painter_draw.ProbeHeads(8, tokenizer.get_vocab(), 4)
    ids = painter_build.prompt_ids(tokenizer, ["a photo of three crosses", "a photo of a bar above a star"])
    begun, layers, looks = torch.zeros(2, 16, 7, dtype=torch.long), torch.randn(2, 2, 16, 8), torch.rand(2, 16, 12)
    both, first = (reading(*layers, looks, ids, torch.tensor(asked), begun) for asked in ([1.0, 1.0], [1.0, 0.0]))
    alone = reading(*layers[:, :1], looks[:1], ids[:1], torch.ones(1), begun[:1])
    assert both != first
    counted = torch.nn.functional.cross_entropy(reading.progress[2](layers[0]).transpose(1, 2), begun[..., 2])
    of_one = torch.nn.functional.cross_entropy(reading.progress[2](layers[0, :1]).transpose(1, 2), begun[:1, :, 2])
    torch.testing.assert_close(first - counted, alone - of_one)  # all but the count comes from the first row


def test_reading_looks_at_the_class_of_a_shape_while_it_is_new():
    tokenizer = painter_build.build_tokenizer()
    reading = painter_draw.ProbeHeads(8, tokenizer.get_vocab(), 2)  # a shape is new for four codes
    ids = painter_build.prompt_ids(tokenizer, ["a photo of a red bar and a blue star"])
    star = (ids[0] == tokenizer.convert_tokens_to_ids("star")).nonzero().item()
    begun, layers, looks = torch.zeros(1, 9, 7, dtype=torch.long), torch.randn(2, 1, 9, 8), torch.rand(1, 9, 12)
    begun[0, 3:, 2], begun[0, 3:, 5] = 1, 1 + CLASSES.index("star")
    less = looks.clone()
    less[0, 3:7, star] /= torch.e
    found = [reading(*layers, at, ids, torch.ones(1), begun) for at in (looks, less)]
    torch.testing.assert_close(found[1] - found[0], torch.tensor(1.0))
    less[0, 7:] = less[0, :3] = 0.5
    torch.testing.assert_close(reading(*layers, less, ids, torch.ones(1), begun), found[1])  # nowhere else


def test_reading_tells_the_colour_that_stands_before_a_class():
    tokenizer = painter_build.build_tokenizer()
    reading = painter_draw.ProbeHeads(len(tokenizer.get_vocab()), tokenizer.get_vocab(), 4)
    ids = painter_build.prompt_ids(tokenizer, ["a photo of a red bar and a blue star", "a photo of a ring"])
    with torch.no_grad():
        reading.told.weight.zero_(), reading.told.bias.zero_()
        before = torch.nn.functional.one_hot(ids.roll(1, 1), len(tokenizer.get_vocab())).float()
        guess = reading.pairs(before, ids)
        for i, colour in enumerate(COLOURS):
            reading.told.weight[1 + i, tokenizer.convert_tokens_to_ids(colour)] = 30.0
        assert reading.pairs(before, ids) < 1e-6 < guess
        assert reading.pairs(before[1:], ids[1:]) == 0  # no colour is named


def test_exchanged_colours_make_a_prompt_of_the_same_words():
    asked = parse("a photo of an orange bar and a blue ring")
    assert painter_draw.swap_pairs(asked)["prompt"] == "a photo of a blue bar and an orange ring"
    assert painter_draw.swap_pairs(painter_draw.swap_pairs(asked)) == asked
    assert all(painter_data.bound_pair(i)[0]["tag"] == "color_attr" for i in range(8))


def test_weights_of_the_loss_depend_on_earlier_codes_only():
    ink = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    near = painter_draw.beside(ink, 4)
    for place in range(16):
        changed = ink.clone()
        changed[:, place:] ^= True
        assert torch.equal(painter_draw.beside(changed, 4)[:, : place + 1], near[:, : place + 1])
    one = torch.zeros(1, 16, dtype=torch.bool)
    one[0, 5] = True
    assert painter_draw.beside(one, 4)[0].nonzero().flatten().tolist() == [6, 8, 9, 10]


def test_training_seeds_stay_below_the_held_out_ones():
    assert max(painter_data.FIRST_SEED.values()) + painter.PAINTER.parse(["--out", "x"]).pairs < HELD_OUT_SEED


def test_reading_labels_say_what_the_prompt_asks_for():
    tokenizer = painter_build.build_tokenizer()
    reading = painter_draw.ProbeHeads(8, tokenizer.get_vocab(), 12)
    prompts = ["a photo of three crosses", "a photo of a bar above a star", "a photo of a red star and a pink ring"]
    labels = torch.stack(reading.labels(painter_build.prompt_ids(tokenizer, prompts)), 1)
    kinds, colours = list(CLASSES), list(COLOURS)
    assert labels[0].tolist() == [kinds.index("cross") + 1, 0, 0, 0, 0, 2]
    assert labels[1].tolist() == [kinds.index("bar") + 1, kinds.index("star") + 1, 0, 0, 3, 0]
    classes = [kinds.index("star") + 1, kinds.index("ring") + 1]
    assert labels[2].tolist() == [*classes, colours.index("red") + 1, colours.index("pink") + 1, 0, 0]


@torch.no_grad()
def test_training_and_stock_generation_see_the_same_law():
    torch.manual_seed(0)
    vq = JanusVQVAE(painter_build.vq_config(True)).state_dict()
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    model = painter_build.build_model(vq, True, small).eval()
    processor = painter_build.build_processor(True)
    inputs = processor(
        text=["a photo of two stars", "a photo of a red ring and a blue bar"],
        generation_mode="image", return_tensors="pt", padding=True,
    )  # fmt: skip
    model.model.generation_head.vision_head.weight.normal_(std=5.0)
    codes = model.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=1.0 + 1e-6)
    model.set_attn_implementation("eager")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    losses = painter_draw.draw_codes(model, ids, mask, codes).losses
    alone = painter_draw.draw_codes(model, ids[:1, 5:], mask[:1, 5:], codes[:1]).losses
    assert losses.shape == (2, 36)
    assert (losses[0] - alone[0]).abs().max() < 0.2  # left padding changes nothing but bfloat16's rounding
    others = painter_draw.draw_codes(model, ids, mask, (codes + 512) % 1024).losses
    assert losses.mean() < others.mean() / 2  # the greedy codes are the likely ones


def test_recipe_runs_on_a_few_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", children.spawn)
    few = ["--out", str(tmp_path), "--workers", "1", "--every", "100", "--every-prompt", "368"]
    few += ["--vq-steps", "3", "--vq-rows", "1", "--pairs", "16", "--steps", "2", "--rows", "1"]
    few += ["--composed-steps", "1", "--decoder-steps", "1"]
    large, low = (replace(recipe, threads=1) for recipe in (painter.PAINTER, painter.LOWRES))
    for stage in ("vq", "composed", "decoder"):
        large.run([*few, "--stage", stage])
    low.run(few)
    folder = tmp_path / "painter-lowres"
    record = json.loads((folder / "provenance.json").read_text())
    assert record["draw"]["steps"] == 2
    assert record["vq"]["steps"] == 3 and record["vq"]["later"] == {"composed.pt": 1, "decoder.pt": 1}
    assert (tmp_path / "painter-lowres.png").stat().st_size > 0
    assert "GenEval" in (folder / "README.md").read_text()
    JanusForConditionalGeneration.from_pretrained(folder)
    large.run([*few, "--stage", "vq", "--resume"])  # nothing left to do


@unshipped
@pytest.mark.parametrize(("low", "folder"), SHIPPED)
def test_cards_are_what_the_recipe_writes_of_their_provenance(low, folder):
    text, record = (folder / "README.md").read_text(), json.loads((folder / "provenance.json").read_text())
    every = len(suite()) // int(re.search(r"GenEval on (\d+) prompts", text)[1])
    with torch.device("meta"):
        model = JanusForConditionalGeneration(JanusConfig.from_pretrained(folder))
    assert painter.card(low, every, text.splitlines()[-1], model, record) == text


@unshipped
@pytest.mark.parametrize("small", [False, True])
def test_cards_of_captioners_are_what_the_recipe_writes_up_to_their_training(small):
    """What follows, and a line of the small one's, was added by hand."""
    shapes = world("shapes")
    folder = zoo.CHECKPOINTS / captioner.NAMES["shapes"][small]
    record = json.loads((folder / "provenance.json").read_text())
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(folder))
    text = captioner.card(shapes, small, model, record)
    written, stored = (card.partition("## Training")[0] for card in (text, (folder / "README.md").read_text()))
    if small:
        added = re.search(r"Greedy captions that equal .*\n\n", stored)[0]
        stored = stored.replace(added, "")
    assert written == stored


@unshipped
@pytest.mark.parametrize(("low", "folder"), SHIPPED)
def test_shipped_weights_are_small_and_described(low, folder):
    weights = folder / "model.safetensors"
    assert weights.stat().st_size <= LIMIT[low]
    record = json.loads((folder / "provenance.json").read_text())
    assert record["weights"]["bytes"] == weights.stat().st_size
    assert f"{record['measured']['pictures']['geneval']:.3f}" in (folder / "README.md").read_text()


@unshipped
def test_shipped_painter_draws_what_it_is_asked_for():
    """Two thirds of the prompts, at its own guidance and temperature; by chance it would be fewer than one in ten."""
    model = JanusForConditionalGeneration.from_pretrained(SHIPPED[0][1], dtype=torch.float32).eval()
    processor, own, rows = JanusProcessor.from_pretrained(SHIPPED[0][1]), model.generation_config, suite()[::16]
    texts = [row["prompt"] for row in rows]
    pictures = painter_draw.draw(model, processor, texts, own.guidance_scale, 0, own.temperature)
    assert pictures.shape == (23, 96, 96, 3)
    assert sum(painter_score.verdicts(pictures, rows)) >= 15


SHORT = pytest.mark.xfail(strict=True, reason="the sibling is short of the aim, as is the ceiling of its codes")


@unshipped
@pytest.mark.parametrize("folder", [SHIPPED[0][1], pytest.param(SHIPPED[1][1], marks=SHORT)])
def test_shipped_painters_reach_their_aim(folder):
    assert json.loads((folder / "provenance.json").read_text())["measured"]["pictures"]["geneval"] >= 0.85


@unshipped
def test_the_siblings_share_their_vq_weights():
    loaded = [JanusForConditionalGeneration.from_pretrained(folder).model.vqmodel.state_dict() for _, folder in SHIPPED]
    assert all(torch.equal(value, loaded[1][name]) for name, value in loaded[0].items())
