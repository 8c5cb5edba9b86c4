"""Painters' folders: what is written is read, as a model and as a pipeline; what is no painter is refused by name."""

import pytest
import torch

from tests import test_any_order_painter, test_mar_painter, test_scale_painter
from tests.doubles import altered, raises_line
from tests.tiny_images import painter_processor
from visspec import ImagePipeline
from visspec.api.loading import load_image_model
from visspec.models.mar.layout import MARImageModel
from visspec.models.randar.layout import RandARImageModel
from visspec.models.var.layout import VARImageModel

KINDS = {  # how a painter is made, its processor, what loads it, a tensor of it, and its type
    "scale": (test_scale_painter.fresh, None, VARImageModel.read, "var.head.bias", "var_image"),
    "mar": (
        lambda: test_mar_painter.fresh(test_mar_painter.SMALL), None, MARImageModel.read, "mar.z_proj.bias",
        "mar_image",
    ),
    "any_order": (
        test_any_order_painter.fresh, lambda: painter_processor(), RandARImageModel.read, "words.weight",
        "randar_image",
    ),
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By kind: a pipeline, and the folder it was saved in."""
    result = {}
    for kind, (make, processor, *_) in KINDS.items():
        with torch.inference_mode(False):
            pipe = ImagePipeline(make(), processor and processor())
        pipe.save_pretrained(folder := tmp_path_factory.mktemp(kind))
        result[kind] = pipe, folder
    return result


@each_kind
def test_folder_round_trip(written, kind):
    pipe, folder = written[kind]
    model, processor = load_image_model(str(folder))
    assert type(model) is type(pipe.model) and not model.training and (processor is None) == (pipe.processor is None)
    assert model.config.model_type == KINDS[kind][-1]
    for name, value in pipe.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.generation_config.guidance_scale == pipe.model.generation_config.guidance_scale != 1.0
    again = ImagePipeline.from_pretrained(str(folder))
    assert (again.drafter, again.acceptance) == (pipe.drafter, pipe.acceptance)
    assert not [file for file in folder.iterdir() if file.suffix in (".bin", ".pt")]
    prompt = getattr(model.config, "labels", ["a photo of a star"])[0]
    assert torch.equal(again(prompt, seed=1).tokens[0], pipe(prompt, seed=1).tokens[0])


@each_kind
def test_tensors_and_types_checked(written, tmp_path, kind):
    _, folder = written[kind]
    name, other = KINDS[kind][3], next(row[-1] for row in KINDS.values() if row[-1] != KINDS[kind][-1])
    for i, (change, message) in enumerate((
        (lambda t, c: t.pop(name), f"lacks tensor '{name}'"),
        (lambda t, c: t.update({"more.weight": torch.ones(1)}), "unknown tensor 'more.weight'"),
        (lambda t, c: t.update({name: torch.ones(3)}), f"tensor '{name}' of .* has shape"),
        (lambda t, c: c.update(model_type=other), f"model_type: got '{other}'"),
    )):  # fmt: skip
        (tmp_path / str(i)).mkdir()
        with raises_line(message):
            KINDS[kind][2](altered(folder, tmp_path / str(i), change))


CHANGES = {
    "scale": [
        (lambda t, c: c["network"].update(depth=0), "unknown tensor"),
        (lambda t, c: c["network"].update(heads=3), "has shape"),
        (lambda t, c: c.update(labels=["one"] * 4), "labels: got 4 names with duplicates"),
        (lambda t, c: c.update(grids=[[1, 1], [2]]), "does not describe a model"),
        (lambda t, c: c["autoencoder"].update(channels=10**9), "does not describe a model"),
    ],
    "mar": [
        (lambda t, c: t["mar.z_proj.bias"].fill_(torch.nan), "not finite"),
        (lambda t, c: c.update(labels=["one"] * 156), "labels: got 1 names, expected 156"),
        (lambda t, c: c.update(predicts="speed"), "predicts: got 'speed', expected one of"),
    ],
    "any_order": [
        (lambda t, c: c["network"].update(grid=4), "does not describe a model"),
        (lambda t, c: c.update(words=1000), "has shape"),
    ],
}


@pytest.mark.parametrize(("kind", "change", "said"), [(kind, *row) for kind, rows in CHANGES.items() for row in rows])
def test_bad_configurations(written, tmp_path, kind, change, said):
    with raises_line(said):
        KINDS[kind][2](altered(written[kind][1], tmp_path, change))
