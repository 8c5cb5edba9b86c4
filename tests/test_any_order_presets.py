"""Presets of any-order models, and the included one of them."""

import json

import pytest
import torch

from tests.test_any_order_painter import TEXTS, fresh, pipe  # noqa: F401
from tests.tiny_images import painter_processor
from visspec import ImagePipeline, registry
from visspec.api import saving
from visspec.cli import bench_image
from visspec.cli.main import main

SHIPPED = registry.CHECKPOINTS / "painter-any-order" / "config.json"
PRESETS = registry.presets("any order").keys() - registry.presets("codes").keys()
shipped = pytest.mark.skipif(not SHIPPED.is_file(), reason="the any-order painter is not in this checkout")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_equals_plain_decoding(pipe, name):  # noqa: F811
    preset = registry.preset(name, "any order")
    plain = pipe(TEXTS, seed=2, drafter="none", acceptance="exact", order=preset.order)
    fast = pipe(TEXTS, seed=2, **preset.method)
    for one, two in zip(plain.tokens, fast.tokens):
        assert torch.equal(one, two)
    assert fast.stats[0].faults == 0 and fast.stats[0].rounds <= plain.stats[0].rounds
    assert not preset.drafter.startswith("ahead") or fast.stats[0].rounds < plain.stats[0].rounds
    assert saving.portable_name("order", preset.order) == preset.order and preset.source


def test_other_painters_refuse_them():
    made = ImagePipeline.from_pretrained("painter")
    for name in PRESETS:
        with pytest.raises(ValueError, match="any-order models"):
            made.setup(**registry.preset(name, "any order").method)


def test_bench_image_any_order(tmp_path, capsys):
    """The order of plain decoding is the family's own, halton; codes in another order have another joint law."""
    folder, record = tmp_path / "painter", tmp_path / "r.json"
    ImagePipeline(fresh(), painter_processor()).save_pretrained(folder)
    argv = ["bench", "image", "--model", str(folder), "--count", "1", "--json", str(record), "--world", "shapes"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(record.read_text())["rows"]}
    assert {"plain", "gumbel", *PRESETS} <= set(rows) and "left out: distilled" in said
    assert rows["gumbel"]["promises_tokens"] and rows["gumbel"]["identical"] == 1
    assert not any(rows[name]["promises_tokens"] for name in PRESETS)
    assert all(rows[name]["guarantee"] == "exact" and rows[name]["drafter"] for name in PRESETS)
    assert bench_image.parse_method("assd", "any order")[1] == "ahead:levels=4/exact/spread"


# --- the included painter ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def painter():
    return ImagePipeline.from_pretrained("painter-any-order")


@shipped
def test_the_included_painter_draws_in_fewer_passes(painter):
    """Its files are weights, a card and where they are from; images are those of plain decoding in the order."""
    folder = SHIPPED.parent
    assert {path.name for path in folder.iterdir()} >= {"README.md", "provenance.json", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_size < 12e6
    text = "a photo of a penguin"
    for name in ("assd", "assd-raster"):
        preset = registry.preset(name, "any order")
        plain = painter(text, seed=1, drafter="none", order=preset.order)
        fast = painter(text, seed=1, **preset.method)
        assert torch.equal(plain.tokens[0], fast.tokens[0]) and fast.stats[0].faults == 0
        assert fast.passes[0].max() + 1 < 60 < plain.passes[0].max() + 1 == 64
