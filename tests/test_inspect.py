"""`visspec inspect`: what a checkpoint is and whether it fits, by headers alone, as the readers themselves judge."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from tests.test_drafter_checkpoints import Largest
from tests.test_lantern_drafters import published as lantern
from tests.test_mtp_files import FORMS, published
from tests.test_mtp_files import saved as saved_target
from tests.test_published import (
    AUX,
    BLOCKS,
    JUNK,
    LAYOUTS,
    cache,  # noqa: F401
    cached,
    domino,
    eagle_2,
    eagle_3,
    named,
    saved,
    speculators_eagle_3,
    vispec,
    z_lab,
)
from tests.tiny import llama, model_of
from visspec.api import zoo
from visspec.api.inspection import inspect
from visspec.cli.main import main
from visspec.models.published import NOT_READ

FOUND = {  # form, layers, convention, hidden states, vocabulary
    "eagle": ("eagle", [-1], "defaults", [-1], None),
    "msd-qwen2-vl": ("eagle", [-1], "defaults", [-1], None),
    "vispec": ("vispec", [-1], "defaults", [-1], None),
    "eagle3": ("eagle3", [0, 0, 0], "outputs", [1, 1, 1], 36),
    "speculators": ("eagle3", [1, 0], "inputs", [1, 0], 36),
    "z-lab": ("dflash", [1, 0], "outputs", [2, 1], None),
    "speculators-dflash": ("dflash", [1], "inputs", [1], 36),
    "z-lab-2": ("dflash2", [1, 0], "outputs", [2, 1], None),
    "dspark": ("dspark", [0], "outputs", [1], None),
    "dspark-speculators": ("dspark", [1], "inputs", [1], 36),
    "deepspec": ("dspark", [0], "outputs", [1], None),
    "domino": ("domino", [1, 0], "outputs", [2, 1], None),
}


def layout_of(name):
    if name in LAYOUTS:
        layout, options, config, _ = LAYOUTS[name]
        return layout, options, config.family
    return BLOCKS[name.replace("speculators-dflash", "speculators")][0], {}, "llava"


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Folders with the configuration of a target, and nothing else."""
    root, made = tmp_path_factory.mktemp("targets"), {}

    def of(name):
        if name not in made:
            model_of(name).config.save_pretrained(root / name)
            made[name] = str(root / name)
        return made[name]

    return of


@pytest.mark.parametrize("name", FOUND)
def test_a_published_form_is_named_and_fits_its_target_alone(tmp_path, name, targets):
    layout, options, family = layout_of(name)
    spec = named(saved(tmp_path / "head", *layout()), options)
    form, layers, convention, states, few = FOUND[name]
    with Largest() as largest:
        alone, fitting = inspect(spec), inspect(spec, targets(family))
        strange = inspect(spec, targets("qwen3_vl"))
    assert largest.found < 200, "no weights were read"
    for found in (alone, fitting, strange):
        assert (found.form, found.layers, found.convention, found.hidden_states) == (form, layers, convention, states)
        assert found.vocabulary == {"target": 96, "draft": few} and found.tensors["count"] == len(layout()[1])
        assert found.positions["theta"] in (5000.0, 10000.0)
    assert (alone.fits, alone.refused, fitting.fits, fitting.refused) == (None, None, True, None)
    with pytest.raises(ValueError) as caught:
        zoo.drafter(spec, model_of("qwen3_vl"))
    assert strange.fits is False and strange.refused == str(caught.value)
