"""The emoji world: its atlas, scenes, captions, prompts and detector; both worlds behind one interface."""

import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.doubles import one_sentence
from visspec.eval.metrics.detection import DetectedColours, Detection, DetectionResult
from visspec.eval.metrics.geneval import judge, select_detections
from visspec.toys.world.captions import words
from visspec.toys.world.emoji import atlas
from visspec.toys.world.emoji.detector import EmojiDetector
from visspec.toys.world.emoji.render import ground, render, stamp
from visspec.toys.world.emoji.scene import (
    GROUNDS,
    SIZES,
    EmojiScene,
    PlacedEmoji,
    scene_from_seed,
)
from visspec.toys.world.emoji.suite import subjects
from visspec.toys.world.scene import GRID, RADIUS
from visspec.toys.world.worlds import WORLDS, world

EMOJI = world("emoji")
captions, suite = EMOJI.captions, EMOJI.suite

seeds = st.integers(0, 2**31 - 1)


@pytest.fixture(scope="module")
def detector() -> EmojiDetector:
    return EmojiDetector()


def truth(scene: EmojiScene) -> dict[str, list[Detection]]:
    """The scene itself as GenEval's objects."""
    boxes = [(p.name, (p.x - p.side / 2, p.y - p.side / 2, p.x + p.side / 2, p.y + p.side / 2)) for p in scene.things]
    found = tuple(Detection(name, 1.0, tuple(v * 96 for v in box)) for name, box in boxes)
    return select_detections(DetectionResult(found), 0.0)


# --- atlas ---


def test_atlas_has_distinct_pictures_and_plain_names():
    assert len(atlas.names()) == len(set(atlas.names())) == 819
    assert all(name == " ".join(name.split()) and 1 <= len(name.split()) <= 4 for name in atlas.names())
    assert not {"large", "small", "left", "right"} & set(" ".join(atlas.names()).split())
    pictures = atlas.premultiplied_tiles()
    assert pictures.shape == (819, atlas.TILE, atlas.TILE, 4) and 0.05 < pictures[..., 3].mean((1, 2)).min()
    assert "SIL OPEN FONT LICENSE Version 1.1" in (atlas.FOLDER / "OFL.txt").read_text()
    assert (atlas.FOLDER / atlas.IMAGE).stat().st_size < 4e6


@pytest.mark.parametrize("change", ["pixels", "names", "missing"])
def test_an_altered_atlas_is_refused_in_a_sentence(tmp_path, change):
    for file in (atlas.IMAGE, atlas.NAMES):
        shutil.copy(atlas.FOLDER / file, tmp_path)
    if change == "pixels":
        (tmp_path / atlas.IMAGE).write_bytes((tmp_path / atlas.IMAGE).read_bytes()[:-1] + b"\0\1")
    elif change == "names":
        text = (tmp_path / atlas.NAMES).read_text()
        (tmp_path / atlas.NAMES).write_text(text.replace("kangaroo", "wallaby"))
    else:
        (tmp_path / atlas.IMAGE).unlink()
    with one_sentence(r"^atlas: got .*, expected .*"):
        atlas.read(tmp_path)


# --- scenes and pixels ---


@pytest.mark.parametrize("kind", GROUNDS)
def test_grounds_have_their_tint_and_their_texture(kind):
    first, again = (ground(kind, "green", 96, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, again) and first.mean((0, 1)).argmax() == 1
    grain = np.abs(first[1:, 1:] - first[:-1, 1:] - first[1:, :-1] + first[:-1, :-1]).mean()
    assert (grain > 5) == (kind in ("grainy", "rough"))


def test_a_picture_stands_where_the_scene_says_and_turns_clockwise():
    pixels, left, top = stamp("rocket", 50.5, 30.25, 24, 0)
    rows, columns = np.indices(pixels.shape[:2]) + 0.5
    weight = pixels[..., 3] / pixels[..., 3].sum()
    full = atlas.premultiplied_tiles()[atlas.numbers()["rocket"]][..., 3]
    at = np.indices(full.shape) + 0.5
    centre = (at * full).sum((1, 2)) / full.sum() / atlas.TILE - 0.5
    found = np.array([(weight * rows).sum() + top - 30.25, (weight * columns).sum() + left - 50.5])
    assert np.abs(found - 24 * centre).max() < 0.2
    turned, x, y = stamp("ladder", 0, 0, 40, 15)
    upper = turned[: -y - 8]
    assert (upper[..., 3] * (np.arange(turned.shape[1]) + x)).sum() > 0  # what was on top went to the right


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (EmojiScene((PlacedEmoji("hexagon", 0.5, 0.5, 0.3),)), "name: got 'hexagon', expected one of the 819 names"),
        (
            EmojiScene((PlacedEmoji("owl", 0.9, 0.5, 0.3),)),
            "scene: got a 'owl' of side 0.30 at (0.90, 0.50), expected a picture",
        ),
        (EmojiScene((PlacedEmoji("owl", 0.5, 0.5, float("nan")),)), "scene: got a 'owl' of side nan"),
        (EmojiScene((), "grass"), "ground: got 'grass', expected one of"),
        (EmojiScene((), tint="mauve"), "tint: got 'mauve', expected one of"),
    ],
)
def test_scenes_that_cannot_be_drawn_are_refused_in_a_sentence(scene, words):
    with one_sentence("^" + re.escape(words)):
        render(scene)


# --- captions ---


def test_every_wrong_word_costs_a_fact():
    scene = EmojiScene(
        (PlacedEmoji("owl", 0.17, 0.17, 0.28), PlacedEmoji("frame with picture", 0.5, 0.5, 0.2)), "rough", tint="blue"
    )
    good = "in the top left corner there is a large owl ."
    assert captions.score(good, scene) == (3, 3) and captions.missing(good, scene) == 7
    for old, new in (("large", "small"), ("owl", "fox face"), ("owl", "unknown thing")):
        assert captions.score(good.replace(old, new), scene) == (2, 3)
    assert captions.score(good.replace("top left", "bottom left"), scene) == (0, 3)
    assert captions.score("the frame with picture is below the owl .", scene) == (1, 1)
    assert captions.score("the owl is below the frame with picture .", scene) == (0, 1)
    assert captions.score("behind lies a rough green ground .", scene) == (1, 2)
    assert captions.score("", scene) == (0, 0)


# --- prompts ---


def test_suite_is_fixed_and_read_back():
    rows = suite.suite()
    assert len(rows) == 360 and len({row["prompt"] for row in rows}) == 360
    assert all(suite.parse(row["prompt"]) == row for row in rows)
    assert all(set(row["prompt"].split()) <= set(suite.vocabulary()) for row in rows)
    assert len(subjects()) == 104


def test_scenes_show_what_the_prompt_asks_for():
    rng = np.random.default_rng(1)
    for row in suite.suite():
        scene = suite.free_scene(row, rng)
        assert judge(None, truth(scene), row, DetectedColours())[0], (row["prompt"], scene)
        assert "ground" not in row or [scene.ground, scene.tint] == row["ground"]


# --- both worlds ---


@pytest.mark.parametrize("name", WORLDS)
def test_the_interface_holds_in_both_worlds(name):
    each = world(name)
    scene = each.scenes(1)[0]
    assert scene == each.captioned(2**30) and each.to_image(scene).size == (each.side, each.side)
    text = each.captions.caption(scene)
    assert each.captions.score(text, scene)[0] == len(each.captions.facts(scene))
    assert each.captions.read_words <= set(each.captions.vocabulary()) | {"zero", "seven", "eight", "nine"}
    held = [thing for cell in range(9) if (thing := scene.at(cell))]
    assert all(getattr(thing, kind) in words for thing in held for kind, words in each.facts.items())
    assert all(getattr(scene, kind) in words for kind, words in each.settings.items()) and len(held) in each.counts
    row = each.prompt(np.random.default_rng(0))
    drawn = each.render(row, np.random.default_rng(1), 96)
    found = each.detector().detect(Image.fromarray(drawn))
    assert judge(None, select_detections(found, 0.0), row, DetectedColours())[0]
    assert {row["tag"] for row in each.prompts()} <= set(each.tasks)


@pytest.mark.parametrize("name", WORLDS)
@given(seeds)
@settings(max_examples=150, deadline=None)
def test_scenes_are_legal_and_repeatable(name, seed):
    each = world(name)
    scene = each.captioned(seed)
    assert scene == each.captioned(seed)
    assert all(getattr(scene, kind) in words for kind, words in each.settings.items())
    cells, held = [thing.cell for thing in scene.things], [getattr(t, each.captions.named) for t in scene.things]
    assert cells == sorted(set(cells)) and len(cells) in each.counts
    assert name == "shapes" or len(set(held)) == len(held)
    for thing in scene.things:
        size, nominal, most = (thing.radius, RADIUS, 0.0051) if name == "shapes" else (thing.side, SIZES, 0.0101)
        left, top, reach = (
            (thing.cell % GRID) / GRID,
            (thing.cell // GRID) / GRID,
            size if name == "shapes" else size / 2,
        )
        assert left < thing.x - reach and thing.x + reach < left + 1 / GRID
        assert top < thing.y - reach and thing.y + reach < top + 1 / GRID
        assert abs(size - nominal[thing.size]) <= most and scene.at(thing.cell) is thing


@pytest.mark.parametrize(("name", "least", "most"), [("shapes", 55, 122), ("emoji", 25, 125)])
@given(seeds, seeds)
@settings(max_examples=200, deadline=None)
def test_captions_state_every_fact_and_nothing_else(name, least, most, seed, phrasing):
    each = world(name)
    scene, language, known = each.captioned(seed), each.captions, set(each.captions.vocabulary())
    for text in (language.caption(scene), language.caption(scene, np.random.default_rng(phrasing))):
        assert dict(language.parse(text)) == language.facts(scene)
        assert language.score(text, scene) == (len(language.facts(scene)),) * 2
        assert language.missing(text, scene) == 0 and least <= len(words(text)) <= most
        assert set(text.split()) <= known
    assert all(set(f"{question} {answer}".split()) <= known for question, answer in language.questions(scene))


REFUSED = {
    "shapes": [
        "a photo of a red circle and a square",  # colour of one only
        "a photo of a circle and a circle",
        "a photo of a orange circle",
        "a photo of two circle",
        "a photo of a red circle above a bar",
    ],
    "emoji": [
        "a photo of an owl on a blue ground",
        "a photo of an owl and an owl",
        "a photo of a owl",
        "a photo of two owls",
    ],
}
FOREIGN = ["a photo of a unicorn", "<b>a photo of a circle</b>", "<b>a photo of an owl</b>", ""]


@pytest.mark.parametrize(("name", "prompt"), [(n, text) for n, texts in REFUSED.items() for text in (*texts, *FOREIGN)])
def test_other_sentences_are_refused(name, prompt):
    own = world(name).suite
    with pytest.raises(ValueError, match=rf"^prompt: got .*, expected a sentence of the {own.world} world's grammar"):
        own.parse(prompt)


def test_an_unknown_world_is_refused():
    with pytest.raises(ValueError, match=r"^world: got 'moon', expected one of \('shapes', 'emoji', 'animals'\)"):
        world("moon")


# --- detector ---


def test_pictures_are_found_where_they_stand(detector):
    for seed in (1, 3):
        scene = scene_from_seed(seed)
        seen = detector.analyse(render(scene))
        assert sorted(s.name for s in seen) == sorted(p.name for p in scene.things)
        for p in scene.things:
            found = next(s for s in seen if s.name == p.name)
            assert max(abs(found.x - p.x * 120), abs(found.y - p.y * 120)) < 1.5
            assert abs(found.side / 120 - p.side) < 0.03 and abs(found.turn - p.turn) < 8


def test_grounds_and_noise_hold_nothing(detector):
    rng = np.random.default_rng(0)
    assert detector.analyse(render(EmojiScene((), "rough", 5, "violet"), 96)) == ()
    assert detector.analyse(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)) == ()
    with pytest.raises(ValueError, match=r"^image: got shape \(16, 16, 3\), expected"):
        detector.analyse(np.zeros((16, 16, 3)))


@pytest.mark.parametrize("count", [2, pytest.param(150, marks=pytest.mark.nightly)])
def test_clean_renders_pass_their_prompt_and_no_other(detector, count):
    rows, rng, right = suite.suite(), np.random.default_rng(0), 0
    for row in (rows[i] for i in rng.integers(len(rows), size=count)):
        names, image = {item["class"] for item in row["include"]}, render(suite.free_scene(row, rng), 96)
        objects = select_detections(detector.detect(Image.fromarray(image)), 0.0)
        right += judge(None, objects, row, DetectedColours())[0]
        others = [other for other in rows if not {item["class"] for item in other["include"]} <= names]
        assert not judge(None, objects, others[int(rng.integers(len(others)))], DetectedColours())[0]
    assert right >= 0.98 * count
