"""The free tier of the shape world: pixels, captions that parse back into facts; the shipped captioners."""

import re
import time
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image

from visspec.api.captions import PROMPT, prepare
from visspec.toys.world import captions
from visspec.toys.world.palette import CANVAS, CLASSES, COLOURS, GROUNDS
from visspec.toys.world.render import coverage, ground, inside, render
from visspec.toys.world.scene import Scene, Shape, scene_from_seed
from visspec.toys.world.worlds import world

ZOO = Path(__file__).resolve().parent.parent / "models" / "zoo"


# --- pixels ---


@pytest.mark.parametrize("kind", CLASSES)
def test_coverage_is_the_area_of_the_template(kind):
    alpha = coverage(kind, 32, 32, 20, 64, 64)
    grid = np.linspace(-1, 1, 1001)
    area = inside(kind, grid[None, :], grid[:, None]).mean() * 4
    assert alpha.min() == 0 and alpha.max() == 1
    assert alpha.sum() / 400 == pytest.approx(area, rel=0.02)


def test_templates_differ_from_each_other():
    flat = np.stack([coverage(kind, 16, 16, 13, 32, 32).ravel() for kind in CLASSES])
    overlap = np.minimum(flat[:, None], flat).sum(-1) / np.maximum(flat[:, None], flat).sum(-1)
    assert overlap[~np.eye(len(CLASSES), dtype=bool)].max() < 0.85


def test_a_circle_has_its_colour_inside_and_the_canvas_outside():
    image = render(Scene((Shape("circle", "green", 0.5, 0.5, 0.13),)), 96)
    assert image.shape == (96, 96, 3) and image.dtype == np.uint8
    assert tuple(image[48, 48]) == COLOURS["green"] and tuple(image[5, 5]) == CANVAS


@pytest.mark.parametrize("kind", GROUNDS)
def test_grounds_are_grey_near_the_canvas_and_fixed_by_the_generator(kind):
    first, again = (ground(kind, 64, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.ptp(first, axis=-1).max() == 0
    assert abs(first.mean() - CANVAS[0]) < 8 and np.abs(first - CANVAS[0]).max() <= 30
    assert (first.std() > 3) == (kind != "plain")


def test_unknown_names_are_refused_by_name():
    with pytest.raises(ValueError, match="'hexagon'"):
        inside("hexagon", np.zeros(1), np.zeros(1))
    with pytest.raises(ValueError, match="'grass'"):
        ground("grass", 8, np.random.default_rng(0))


def test_rendering_is_fast():
    scenes = [scene_from_seed(i) for i in range(100)]
    begun = time.process_time()
    for scene in scenes:
        render(scene)
    assert (time.process_time() - begun) / len(scenes) < 0.005  # measured 0.0005


# --- captions ---


def test_printed_spelling_parses_as_well():
    scene = scene_from_seed(5)
    printed = captions.caption(scene).replace(" .", ".").replace(" ,", ",").capitalize()
    assert captions.parse(printed) == captions.parse(captions.caption(scene))


def test_every_wrong_word_costs_a_fact():
    scene = Scene((Shape("star", "red", 0.17, 0.17, 0.13), Shape("bar", "blue", 0.5, 0.5, 0.075)), "cloudy")
    good = "in the top left corner there is a large red star ."
    assert captions.score(good, scene) == (4, 4) and captions.missing(good, scene) == 6
    for old, new in (("large", "small"), ("red", "pink"), ("star", "ring")):
        assert captions.score(good.replace(old, new), scene) == (3, 4)
    assert captions.score(good.replace("top left", "bottom left"), scene) == (0, 4)
    assert captions.score(good.replace("in the top left corner ", ""), scene) == (0, 4)
    assert captions.score(good + " " + good, scene) == (4, 8)
    assert captions.score("the middle of the picture stays empty .", scene) == (0, 1)
    assert captions.score("", scene) == (0, 0)


def test_phrasings_follow_their_weights():
    scene, n = scene_from_seed(1), 2000
    rng = np.random.default_rng(0)
    openings = [" ".join(captions.caption(scene, rng).split()[:2]) for _ in range(n)]
    shares = [openings.count(start) / n for start in ("this picture", "there are", "one can")]
    assert shares == pytest.approx(captions.WEIGHTS, abs=0.04)


def test_captions_are_not_one_repeated_pattern():
    tokens = captions.caption(scene_from_seed(0)).split()
    trigrams = list(zip(tokens, tokens[1:], tokens[2:]))
    assert len(set(trigrams)) / len(trigrams) > 0.85


def test_questions_are_answered_from_the_scene():
    scene = Scene((Shape("star", "red", 0.17, 0.17, 0.13), Shape("bar", "blue", 0.5, 0.5, 0.075)), "cloudy")
    answers = dict(captions.questions(scene))
    assert answers["how many shapes are there ?"] == "two ."
    assert answers["what colour is the star ?"] == "red ."
    assert answers["what is in the very centre ?"] == "a small blue bar ."
    assert answers["what is at the top edge ?"] == "nothing ."


# --- the shipped captioners ---

shipped = pytest.mark.skipif(not (ZOO / "captioner" / "model.safetensors").exists(), reason="weights not in this tree")


@shipped
@pytest.mark.parametrize(
    "name, of, least, shortest",
    [("captioner", "shapes", 0.95, 55), ("captioner-small", "shapes", 0.5, 55), ("captioner-emoji", "emoji", 0.85, 25)],
)
def test_shipped_captioner_loads_offline_and_says_what_is_there(name, of, least, shortest):
    """Greedy captions against the held-out ones, word by word."""
    processor = transformers.AutoProcessor.from_pretrained(ZOO / name, local_files_only=True)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(ZOO / name, local_files_only=True).float().eval()
    assert not model.generation_config.do_sample and model.generation_config.eos_token_id is not None
    own = world(of)
    inputs = prepare(processor, own.images(16), PROMPT, model)
    new = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    found = [re.findall(r"\w+|[.,]", text) for text in processor.batch_decode(new, skip_special_tokens=True)]
    captions = [own.captions.caption(scene).split() for scene in own.scenes(16)]
    alike = [SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in zip(found, captions)]
    assert sum(alike) / len(alike) >= least
    assert min(map(len, found)) >= shortest


@shipped
def test_processor_takes_both_call_forms_and_odd_images():
    processor = transformers.AutoProcessor.from_pretrained(ZOO / "captioner", local_files_only=True)
    image = Image.new("RGBA", (300, 170), (200, 10, 10, 255)).convert("RGB")
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Describe the picture in detail."}]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    plain = processor(
        text="user : <image> describe the picture in detail . assistant :", images=image, return_tensors="pt"
    )
    assert chat["input_ids"].tolist() == plain["input_ids"].tolist()
    assert int((plain["input_ids"] == processor.image_token_id).sum()) == 36
    assert chat["pixel_values"].shape == (1, 3, 96, 96)
    assert processor.tokenizer.unk_token_id not in plain["input_ids"][0].tolist()
