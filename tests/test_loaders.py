"""Around the loaders: wrapped names, averaged weights, what configurations say, values that are no weights."""

import argparse
import copy
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from tests import tiny_images
from tests.doubles import raises_line
from tests.layouts import chameleon_vq_names, filled, gpt_names
from tests.test_image_nets import LOADERS
from visspec.api.images.pipeline import ImagePipeline
from visspec.cli.main import main
from visspec.io import checkpoint
from visspec.io.convert_checkpoint import convert
from visspec.models.codecs import vq_layout as layouts_vq
from visspec.models.llamagen import layout as layouts_llamagen
from visspec.models.llamagen import network as llamagen
from visspec.models.published_tensors import Weights, rename

# --- from a loader to a pipeline -------------------------------------------------------------------------------------


def test_janus_without_ids(tmp_path):
    model = copy.deepcopy(tiny_images.janus())
    model.generation_config = GenerationConfig()
    with raises_line("got no bos_token_id, pad_token_id, generation_kwargs=.*Set model.generation_config = Generat"):
        ImagePipeline(model, None)
    ids = {"bos_token_id": 1, "pad_token_id": 0}
    model.generation_config = GenerationConfig(**ids)
    with pytest.raises(
        ValueError, match=r"generation_config: got no generation_kwargs=\{'boi_token_id': \.\.\.\}\. Set"
    ):
        ImagePipeline(model, None)
    model.generation_config = GenerationConfig(**ids, generation_kwargs={"boi_token_id": 3})
    pipe = ImagePipeline(model, None)
    with raises_line("processor: got None, expected that of janus"):
        pipe("a red cube")
    for name in ("emu3", "glm_image", "chameleon"):  # other families, too
        with raises_line(f"processor: got None, expected that of {name}"):
            ImagePipeline(getattr(tiny_images, name)(), None)("a red cube", output_type="latent")
    with pytest.raises(ValueError, match="processor: got NoneType, expected a processor of transformers to save"):
        pipe.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is written before that is known"
    pipe = ImagePipeline(model, tiny_images.Words())
    out = pipe(["a red cube", "two"], seed=0)
    assert [image.size for image in out.images] == [(32, 32)] * 2 and out.tokens[0].shape == (16,)


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LOADERS)
def test_non_weights_refused(tmp_path, layout):
    names, load = LOADERS[layout]
    file, tensors = tmp_path / "model.safetensors", filled(names())
    ends = "mid.0.conv1.weight", "mid.block_1.conv1.weight", "wo.weight"
    name = next(name for name in sorted(tensors) if name.endswith(ends))
    broken = tensors[name].clone()
    broken.view(-1)[3] = float("nan")
    endless = torch.where(broken.isnan(), float("-inf"), broken)
    whole = (10 * tensors[name]).to(torch.int8)
    for value, words in ((broken, "not finite"), (endless, "not finite"), (whole, "dtype int8, expected float32")):
        save_file(tensors | {name: value}, file)
        with raises_line(f"{re.escape(repr(name))}.*{words}"):
            load(file)
    half = {n: t.to(torch.bfloat16) for n, t in tensors.items()}
    save_file(half, file)
    load(file)  # another precision is no fault


# --- wrappers --------------------------------------------------------------------------------------------------------

PREFIXES = ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.", "ema.", "ema.module.", "ema_model."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_wrappers_are_taken_off(tmp_path, prefix):
    tensors = filled(gpt_names(False))
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    model = layouts_llamagen.load_llamagen(tmp_path / "a.safetensors", 4, 4)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_compiled_parts_unwrapped(tmp_path):
    tensors = filled(chameleon_vq_names())
    wrapped = {n.replace("encoder.", "encoder._orig_mod."): t for n, t in tensors.items()}
    save_file(wrapped, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    ours, plain = (layouts_vq.load_taming_vq(tmp_path / f"{n}.safetensors").model.state_dict() for n in "ab")
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    with pytest.raises(ValueError, match=r"holds tensor 'a\.w' twice"):
        checkpoint.unwrap_names({"a._orig_mod.w": torch.zeros(1), "a.w": torch.zeros(1)}, "x")


def test_two_sets_of_weights_are_refused(tmp_path):
    tensors = filled(gpt_names(False))
    file = tmp_path / "a.safetensors"
    save_file({**tensors, **{f"ema.{n}": t + 1 for n, t in tensors.items()}}, file)
    with raises_line(r"averaged weights \(.*\) beside others"):
        layouts_llamagen.load_llamagen(file, 4, 4)


# --- the conversion --------------------------------------------------------------------------------------------------


def pickled(tmp_path, content, name="a.pt"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def filed(tensors):
    """Files that hold weights and their averages (one more in each entry), as training scripts write them."""
    averaged = {name: tensor + 1 for name, tensor in tensors.items()}
    return {
        "beside": {"model": tensors, "ema": averaged, "steps": 3, "args": argparse.Namespace(lr=1.0)},
        "wrapped": {"model": {f"module.{n}": t for n, t in tensors.items()}, "ema": {"module": averaged}},
        "deeper": {"state_dict": {"model": tensors, "ema": averaged}},
        "of MAR": {"model": tensors, "model_ema": averaged, "optimizer": {"state": {}}, "epoch": 400},
        "prefixed": {"state_dict": tensors | {f"ema.{n}": t for n, t in averaged.items()}},
    }


@pytest.mark.parametrize("form", filed({}))
def test_prefers_averaged_weights(tmp_path, form):
    tensors, out = filled(gpt_names(False)), tmp_path / "out.safetensors"
    convert(pickled(tmp_path, filed(tensors)[form]), out)
    result = load_file(out)
    assert result.keys() == tensors.keys()
    assert all(torch.equal(result[name], tensor + 1) for name, tensor in tensors.items())


def test_averaged_weights_alone_are_written(tmp_path):
    tensors = filled(gpt_names(False))
    for i, content in enumerate(
        ({"ema": tensors}, {f"ema.{n}": t for n, t in tensors.items()}, {"ema": {"module": tensors}})
    ):
        out = tmp_path / f"{i}.safetensors"
        convert(pickled(tmp_path, content), out)
        assert load_file(out).keys() == tensors.keys()
        assert layouts_llamagen.load_llamagen(out, 4, 4).config.classes == 10


@pytest.mark.parametrize("folder", [False, True])
def test_converted_with_other_files(tmp_path, folder, capsys):
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (home / "config.json").write_text("{}")
    pickled(home, {"model": {"w": torch.ones(2)}}, "pytorch_model.bin")
    path = home if folder else home / "pytorch_model.bin"
    assert main(["convert", "safetensors", str(path), "--out", str(out)]) == 0
    assert load_file(out / "pytorch_model.safetensors")["w"].sum() == 2
    assert (out / "config.json").is_file() == folder
    assert main(["convert", "safetensors", str(out), "--out", str(tmp_path / "again")]) == 2
    assert "holds no pickled weights" in capsys.readouterr().err and not (tmp_path / "again").exists()


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize("content, words", [
    ({"model": Harmful()}, "its pickle asks for print, which is not run"), ([1, 2], "path: "), ({"steps": 1}, "path: "),
    (b"junk", "path: "), (b"", "EOFError"), (None, "does not exist"),
])  # fmt: skip
def test_pickle_error_gives_no_unsafe_advice(tmp_path, content, words, capsys):
    path = tmp_path / "bad.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert main(["convert", "safetensors", str(path), "--out", str(tmp_path / "x")]) == 2
    message = capsys.readouterr()
    assert words in message.err and message.err.count("\n") == 1 and "must not run" not in message.out
    assert not re.search("weights_only|trust|allowlist", message.err) and not (tmp_path / "x").exists()


# --- LlamaGen without a null class, and a quiet codec --------------------------------------------------------------


@torch.no_grad()
def test_no_null_class_no_guidance(tmp_path, monkeypatch):
    """Its last class is a class like any other, not what stands for none."""
    tensors = filled(gpt_names(False), 0.3)
    file = tmp_path / "a.safetensors"
    save_file(tensors, file)
    with monkeypatch.context() as patch:
        patch.setattr(layouts_llamagen, "IMAGENET", 11)
        model = layouts_llamagen.load_llamagen(file, 4, 4)
    assert (model.config.classes, model.config.null_class, model.guided) == (11, False, False)
    assert torch.equal(model.prefix(torch.tensor([10]))[0, 0], tensors["cls_embedding.embedding_table.weight"][10])
    pipe = ImagePipeline(model, None)
    assert pipe("10", seed=0, output_type="latent").tokens[0].shape == (16,), "unguided is its default"
    with pytest.raises(ValueError, match=r"guidance_scale: expected 1.*no null class"):
        pipe("10", guidance_scale=4.0, output_type="latent")
    guided = layouts_llamagen.load_llamagen(file, 4, 4)
    assert guided.config.classes == 10 and guided.guided and ImagePipeline(guided, None).family.default_guidance == 4.0


@pytest.mark.parametrize("rows, null", [(1001, True), (1000, False)])
def test_imagenet_table_by_rows(rows, null):
    tensors = filled(gpt_names(False) | {"cls_embedding.embedding_table.weight": (rows, 32)})
    config = layouts_llamagen.config_of(Weights("x", rename(tensors, ())), 4, 4)
    assert (config.classes, config.null_class) == (1000, null)
    assert llamagen.LlamaGen(config).cls_embedding.embedding_table.num_embeddings == rows
