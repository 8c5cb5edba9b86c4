"""The emoji painter: the stages of its recipe on two pictures, and the weights that are included."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor

from tests import children
from tests.tiny_images import NARROW
from visspec.api import zoo
from visspec.api.images import ImagePipeline
from visspec.api.loading import load_image_model
from visspec.models.image_codes.families import family_of
from visspec.models.lowres.drafter import check_siblings, load_upsampler
from visspec.toys.recipes import emoji_painter, painter_build, painter_draw, painter_score, painter_upsampler
from visspec.toys.recipes.emoji_painter import side_of
from visspec.toys.world.emoji.suite import ALONE, subjects
from visspec.toys.world.worlds import world

FOLDER = zoo.CHECKPOINTS / emoji_painter.NAME
EMOJI = world("emoji")
shipped = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason="weights not in this checkout")


def test_every_pair_shows_the_animal_of_its_prompt():
    names = set(subjects()[::ALONE])
    rows = [emoji_painter.pair(number) for number in range(40)]
    assert {row["include"][0]["class"] for row, _ in rows} <= names and len(names) == 35
    assert all([p.name for p in scene.things] == [row["include"][0]["class"]] for row, scene in rows)
    assert 5 < sum("ground" in row for row, _ in rows) < 35
    assert all((scene.ground, scene.tint) == tuple(row["ground"]) for row, scene in rows if "ground" in row)


@pytest.mark.slow
def test_the_stages_learn_resume_and_know_animals(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", children.spawn)
    monkeypatch.setitem(painter_build.TEXT, False, NARROW)
    common = ["--out", str(tmp_path), "--workers", "1", "--every", "2", "--every-prompt", "160"]
    emoji_painter.PAINTER.run([*common, "--stage", "vq", "--vq-steps", "2", "--vq-rows", "1"])
    emoji_painter.PAINTER.run([*common, "--stage", "tokens", "--pairs", "4"])
    data = torch.load(tmp_path / "tokens-0-4.pt", weights_only=True)
    rows = [emoji_painter.pair(emoji_painter.FIRST_SEED["tokens"] + i)[0] for i in range(4)]
    assert [subjects()[i] for i in data["animal"].tolist()] == [row["include"][0]["class"] for row in rows]
    options = SimpleNamespace(out=tmp_path, pairs=4, steps=50, rate=1e-3, rows=4, workers=1, lowres=False)
    stage = emoji_painter.EmojiDrawStage(options, 0)
    stage.update()
    first = dict(stage.notes)
    for _ in range(6):
        stage.update()
    fallen = {name: before - stage.notes[name] for name, before in first.items()}
    assert set(fallen) == {"codes", "told"} and fallen["codes"] > 0.2 and fallen["told"] > 0.5
    stage.step = 40  # the throw-away head has faded
    stage.notes = {}
    stage.update()
    assert not stage.notes


@shipped
@pytest.mark.slow
def test_the_sibling_and_the_upsampler_learn_from_the_same_pictures(tmp_path, monkeypatch):
    monkeypatch.setitem(painter_build.TEXT, True, NARROW)
    common = ["--out", str(tmp_path), "--every-prompt", "160", "--pairs", "8"]
    emoji_painter.LOWRES.run([*common, "--stage", "vq", "tokens"])
    stage = emoji_painter.EmojiDrawStage(emoji_painter.LOWRES.parse([*common, "--rows", "2"]), 0)
    stage.update()
    painter = family_of(*load_image_model(str(FOLDER)))
    check_siblings(family_of(stage.model, stage.processor), painter)
    assert side_of(stage.model.model.vqmodel) == 48 and stage.file.name == "draw-lowres.pt"
    emoji_painter.PAINTER.run([*common, "--stage", "tokens"])
    made = ["--out", str(tmp_path / "upsampler"), "--tokens", str(tmp_path), "--pairs", "8", "--rows", "2"]
    options = painter_upsampler.OF_EMOJI.parse([*made, "--steps", "1", "--every", "1"])
    painter_upsampler.UpsamplerStage(options, 0).run()
    painter_upsampler.finish(options)
    card = (tmp_path / "upsampler" / "README.md").read_text()
    assert "painter-emoji-lowres" in card and "shapes" not in card
    enlarged = load_upsampler(tmp_path / "upsampler", painter)(torch.zeros(1, 6, 6, dtype=torch.long))
    assert enlarged.shape[1:3] == (12, 12)
    torch.save(torch.load(tmp_path / "tokens-0-8.pt") | {"ids": torch.zeros(8, 16)}, tmp_path / "tokens-0-8.pt")
    with pytest.raises(ValueError, match="has other scenes at 48 than at 96 pixels, expected the same pairs"):
        painter_upsampler.pairs("emoji", tmp_path, 8)


@shipped
def test_the_card_is_what_the_recipe_writes_of_its_provenance():
    for low, folder in ((True, FOLDER.with_name(emoji_painter.SIBLING)), (False, FOLDER)):
        record = json.loads((folder / "provenance.json").read_text())
        with torch.device("meta"):
            model = JanusForConditionalGeneration(JanusConfig.from_pretrained(folder))
        assert emoji_painter.card(model, record, low) == (folder / "README.md").read_text()
        assert record["weights"]["bytes"] == (folder / "model.safetensors").stat().st_size < 25e6
    law = record["measured"]["law"]
    assert law["top_1"] <= 0.5 and record["measured"]["pictures"]["images"] >= 0.5


@shipped
@pytest.mark.parametrize("every", [40, pytest.param(20, marks=pytest.mark.nightly)])
def test_the_painter_draws_the_animals_and_its_laws_are_flat(every):
    """Half of them; by chance it would be one in some hundred."""
    model = JanusForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    processor, rows = JanusProcessor.from_pretrained(FOLDER), EMOJI.prompts()[::every]
    texts = [row["prompt"] for row in rows]
    pictures = painter_draw.draw(model, processor, texts, model.generation_config.guidance_scale, 0)
    assert sum(painter_score.verdicts(pictures, rows, "emoji")) >= len(rows) // 2
    model.set_attn_implementation("eager")
    assert emoji_painter.law(model, rows)["top_1"] < 0.6


@shipped
def test_its_drafter_is_chosen_by_presets_and_changes_no_code():
    pipe = ImagePipeline.from_pretrained(emoji_painter.NAME)
    text, method = "a photo of a penguin", zoo.method(str(zoo.preset("drafter", model=pipe.model)))
    assert method["drafter"].startswith("painter-emoji-eagle")
    plain, drafted = (pipe(text, seed=3, output_type="latent", **m) for m in (zoo.method("none/exact"), method))
    assert torch.equal(plain.tokens[0], drafted.tokens[0])
    assert "drafted" in drafted.traces[0].origin[0]
