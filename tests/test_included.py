"""The table of included models: what it holds, what it fills in for presets, and weights that an installation lacks."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from visspec import presets, registry
from visspec.io import included
from visspec.toys.table import INCLUDED


def model(name):
    """What the table looks at of a model."""
    return SimpleNamespace(config=AutoConfig.from_pretrained(included.folder(name)))


def test_every_folder_of_weights_has_a_row_and_every_row_a_folder():
    assert {included.folder(name).name for name in INCLUDED.models} == {
        path.parent.name for path in included.FOLDER.glob("*/config.json")
    }
    targets = {row.target for row in INCLUDED.models.values()} - {""}
    assert targets | {INCLUDED.text_model, INCLUDED.image_model} <= set(INCLUDED.models)
    worlds = INCLUDED.worlds.values()
    references = [
        INCLUDED.foreign,
        *(world.detector_reference for world in worlds),
        *(world.render_reference for world in worlds),
    ]
    assert all(callable(included.load(reference)) for reference in references)


@pytest.mark.parametrize("name,expected", [
    ("painter", {"drafter": "painter-eagle:levels=8", "naive": "painter-eagle:tree=dynamic", "cool": "painter-eagle",
                 "distilled": "painter-distilled", "mulo": "lowres:upsample=painter-upsampler", "gumbel": "jacobi"}),
    ("painter-emoji", {"drafter": "painter-emoji-eagle:levels=8", "distilled": "distilled",
                       "mulo": "lowres:upsample=painter-emoji-upsampler", "plain": "none"}),
    ("captioner", {"naive": "image-eagle:tree=dynamic"}),
])  # fmt: skip
def test_presets_get_the_included_drafter_of_the_model_at_hand(name, expected):
    for preset, drafter in expected.items():
        found = registry.preset(preset, "codes", model(name)).drafter
        assert found == drafter if ":" in drafter else found.partition(":")[0] == drafter
    assert {registry.parse(preset.drafter)[0] for table in presets.IMAGES.values() for preset in table.values()} <= {
        *registry.DRAFTERS
    }


def test_the_default_drafter_is_the_included_one_of_its_kind():
    assert registry.included_drafter(model("captioner")) == "vispec"
    assert registry.included_drafter(model("captioner-emoji")) == "vispec-emoji"
    assert registry.included_drafter(model("captioner"), "image-eagle") is None is registry.included_drafter(object())


def test_weights_that_are_not_in_an_installation_are_named_with_where_to_find_them(tmp_path, monkeypatch):
    captioner = model("captioner")
    monkeypatch.setattr(included, "FOLDER", tmp_path)
    lacks = "whose weights are not in this installation, expected them in .*; the repository has them"
    with pytest.raises(ValueError, match=f"^checkpoint: got 'painter-mar', {lacks}"):
        registry.included_folder("painter-mar")
    with pytest.raises(ValueError, match=f"^drafter: got 'vispec', {lacks}"):
        registry.drafter("vispec", captioner)
    assert registry.included_drafter(captioner) is None
    assert (
        str(registry.included_folder("owner/painter-mar")) == "owner/painter-mar"
        and str(registry.included_folder("nowhere")) == "nowhere"
    )
