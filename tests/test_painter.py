"""The included painters of codes: sizes, cards, what they draw, and the drafter of the emoji's painter."""

import json

import pytest
import torch
from transformers import JanusForConditionalGeneration, JanusProcessor

from visspec.api.images.pipeline import ImagePipeline
from visspec.eval.metrics import geneval
from visspec.eval.metrics.detection import DetectedColours
from visspec.io import included

LIMIT = {  # bytes
    "painter": 18e6, "painter-lowres": 6e6, "painter-emoji": 25e6, "painter-emoji-lowres": 25e6, "painter-var": 9e6,
    "painter-var-small": 3e6,
}  # fmt: skip
pytestmark = pytest.mark.skipif(not all(map(included.present, LIMIT)), reason="no painter weights in the zoo")


def record_of(name):
    return json.loads((included.folder(name) / "provenance.json").read_text())


@pytest.mark.parametrize("name", LIMIT)
def test_weights_are_small_and_described(name):
    weights, record = included.folder(name) / "model.safetensors", record_of(name)
    assert record["weights"]["bytes"] == weights.stat().st_size <= LIMIT[name]
    if name in ("painter", "painter-lowres"):
        assert f"{record['measured']['pictures']['geneval']:.3f}" in (included.folder(name) / "README.md").read_text()


@pytest.mark.parametrize("name, world", [("painter", "shapes"), ("painter-emoji", "emoji")])
def test_processors_know_every_prompt(name, world):
    processor = JanusProcessor.from_pretrained(included.folder(name))
    prompts = [row["prompt"] for row in included.scenes(world).prompts()]
    ids = processor(text=prompts, generation_mode="image", return_tensors="pt", padding=True)["input_ids"]
    assert (ids[:, -1] == processor.tokenizer.convert_tokens_to_ids("<begin_of_image>")).all()
    assert processor.tokenizer.unk_token_id not in ids
    assert processor.tokenizer.batch_decode(ids, skip_special_tokens=True) == prompts


@pytest.mark.parametrize("name, world, every, least", [
    ("painter", "shapes", 32, 7), pytest.param("painter", "shapes", 16, 15, marks=pytest.mark.nightly),
    pytest.param("painter-emoji", "emoji", 20, 4, marks=pytest.mark.nightly),
])  # fmt: skip
def test_painters_follow_prompts(name, world, every, least):
    """Two thirds of the shapes and half of the animals, where chance gives a tenth and a few in a hundred."""
    scenes, pipe = included.scenes(world), ImagePipeline.from_pretrained(name)
    rows, detector, colours = scenes.prompts()[::every], scenes.detector(), DetectedColours()
    images = pipe([row["prompt"] for row in rows], seed=0, batch_size=len(rows)).images
    right = [geneval.judge_image(image, row, detector, colours)[0] for image, row in zip(images, rows)]
    assert sum(right) >= least


def test_measured_aims():
    assert record_of("painter")["measured"]["pictures"]["geneval"] >= 0.85
    measured = record_of("painter-emoji")["measured"]
    assert measured["law"]["top_1"] <= 0.5 and measured["pictures"]["images"] >= 0.5


def test_siblings_share_their_vq_weights():
    folders = [included.folder(name) for name in ("painter", "painter-lowres")]
    one, two = (JanusForConditionalGeneration.from_pretrained(f).model.vqmodel.state_dict() for f in folders)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_emoji_drafter():
    pipe = ImagePipeline.from_pretrained("painter-emoji")
    text = "a photo of a penguin"
    plain, drafted = (pipe(text, seed=3, output_type="latent", preset=name) for name in ("plain", "drafter"))
    assert drafted.stats[0].drafter == "painter-emoji-eagle"
    assert torch.equal(plain.tokens[0], drafted.tokens[0])
    assert "drafted" in drafted.traces[0].origin[0]
