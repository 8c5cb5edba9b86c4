"""The emoji world: its atlas, scenes and detector; scenes of both worlds by seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from visspec.eval.metrics.detection import DetectedColours
from visspec.eval.metrics.geneval import judge, select_detections
from visspec.io import included
from visspec.toys.world.emoji import atlas
from visspec.toys.world.emoji.detector import EmojiDetector
from visspec.toys.world.emoji.render import render
from visspec.toys.world.emoji.scene import SIZES, EmojiScene, scene_from_seed
from visspec.toys.world.scene import GRID, RADIUS
from visspec.toys.world.scene import scene_from_seed as shapes_from_seed


@pytest.fixture(scope="module")
def detector() -> EmojiDetector:
    return EmojiDetector()


# --- atlas ---


def test_atlas_pictures_and_names():
    assert len(atlas.names()) == len(set(atlas.names())) == 819
    assert all(name == " ".join(name.split()) and 1 <= len(name.split()) <= 4 for name in atlas.names())
    assert not {"large", "small", "left", "right"} & set(" ".join(atlas.names()).split())
    pictures = atlas.premultiplied_tiles()
    assert pictures.shape == (819, atlas.TILE, atlas.TILE, 4) and 0.05 < pictures[..., 3].mean((1, 2)).min()
    assert "SIL OPEN FONT LICENSE Version 1.1" in (atlas.FOLDER / "OFL.txt").read_text()
    assert (atlas.FOLDER / atlas.IMAGE).stat().st_size < 4e6


# --- scenes by seed ---


@pytest.mark.parametrize("name", ["shapes", "emoji"])
@given(st.integers(0, 2**31 - 1))
@settings(max_examples=150, deadline=None)
def test_scenes_are_legal_and_repeatable(name, seed):
    sample, counts, sizes = (shapes_from_seed, (3, 4, 5, 6), RADIUS) if name == "shapes" else (
        scene_from_seed, (1, 2, 3, 4, 5), SIZES)  # fmt: skip
    scene = sample(seed)
    assert scene == sample(seed)
    cells = [thing.cell for thing in scene.things]
    assert cells == sorted(set(cells)) and len(cells) in counts
    assert name == "shapes" or len({thing.name for thing in scene.things}) == len(cells)
    for thing in scene.things:
        size, most = (thing.radius, 0.0051) if name == "shapes" else (thing.side, 0.0101)
        reach = size if name == "shapes" else size / 2
        left, top = (thing.cell % GRID) / GRID, (thing.cell // GRID) / GRID
        assert left < thing.x - reach and thing.x + reach < left + 1 / GRID
        assert top < thing.y - reach and thing.y + reach < top + 1 / GRID
        assert abs(size - sizes[thing.size]) <= most and scene.at(thing.cell) is thing


# --- detector ---


def test_pictures_are_found_where_they_stand(detector):
    scene = scene_from_seed(1)
    seen = detector.analyse(render(scene))
    assert sorted(s.name for s in seen) == sorted(p.name for p in scene.things)
    for p in scene.things:
        result = next(s for s in seen if s.name == p.name)
        assert max(abs(result.x - p.x * 120), abs(result.y - p.y * 120)) < 1.5
        assert abs(result.side / 120 - p.side) < 0.03 and abs(result.turn - p.turn) < 8


def test_grounds_and_noise_hold_nothing(detector):
    rng = np.random.default_rng(0)
    assert detector.analyse(render(EmojiScene((), "rough", 5, "violet"), 96)) == ()
    assert detector.analyse(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)) == ()
    with pytest.raises(ValueError, match=r"^image: got shape \(16, 16, 3\), expected"):
        detector.analyse(np.zeros((16, 16, 3)))


@pytest.mark.parametrize("count", [2, pytest.param(150, marks=pytest.mark.nightly)])
def test_clean_renders(detector, count):
    world, rng, right = included.scenes("emoji"), np.random.default_rng(0), 0
    rows = world.prompts()
    for row in (rows[i] for i in rng.integers(len(rows), size=count)):
        result = detector.detect(Image.fromarray(world.render(row, rng, 96)))
        objects, shown = select_detections(result, 0.0), row["include"][0]["class"]
        right += judge(None, objects, row, DetectedColours())[0]
        others = [other for other in rows if other["include"][0]["class"] != shown]
        assert not judge(None, objects, others[int(rng.integers(len(others)))], DetectedColours())[0]
    assert right >= 0.98 * count
