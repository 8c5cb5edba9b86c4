"""Drafter checkpoints: every configuration loads, or is refused in one sentence before memory is allocated."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny_images
from tests.doubles import raises_line
from tests.tiny import model_of
from visspec import registry
from visspec.models.block.trained import BlockDrafter
from visspec.models.distilled.drafter import DistilledDrafter
from visspec.models.drafting.checkpoint import write
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.image_drafter import ImageFeatureDrafter
from visspec.models.image_codes.family import family_of
from visspec.models.lowres import drafter as lowres
from visspec.models.lowres.upsampler import Upsampler, UpsamplerConfig


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.found = max(self.found, tensor.untyped_storage().nbytes() // 4)
        return made


def janus():
    return family_of(tiny_images.janus(), None)


BLOCK = {"layers": 2, "block": 4}
KINDS = {  # how they are made and loaded
    "text": (lambda: EagleDrafter.for_model(model_of("llava"), image_latents=2), EagleDrafter, "llava"),
    "image": (lambda: ImageFeatureDrafter.for_model(janus()), ImageFeatureDrafter, "janus"),
    "distilled": (lambda: DistilledDrafter.for_model(janus(), layers=1), DistilledDrafter, "janus"),
    "block": (lambda: BlockDrafter.for_model(model_of("llava"), **BLOCK), BlockDrafter, "llava"),
    "dspark": (lambda: BlockDrafter.for_model(model_of("llava"), **BLOCK, markov=5, confidence=True), BlockDrafter,
               "llava"),
}  # fmt: skip


@pytest.fixture(scope="module")
@torch.inference_mode(False)
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafters")
    write(root / "upsampler", Upsampler(UpsamplerConfig(tiny_images.CODES, width=8, layers=2)), {})
    result = {"upsampler": (root / "upsampler", lambda folder: lowres.load_upsampler(folder, janus()))}
    for kind, (make, loader, of) in KINDS.items():
        make().save_pretrained(root / kind, {"seed": 1}, torch.float16)
        target = janus() if of == "janus" else model_of(of)
        result[kind] = root / kind, partial(loader.from_pretrained, target=target)
    return result


def outcome(folder, load, config):
    """What becomes of a folder with this configuration: None, or the sentence that refuses it."""
    before = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        with Largest() as largest:
            load(folder)
        return None
    except ValueError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 600, message
        return message
    finally:
        (folder / "config.json").write_text(before)
        assert largest.found < 1_000_000, "nothing near what it asks for was allocated"


OPTIONS = {  # of some kinds at loading, and what they become
    "distilled": ("levels=3,refine=2", {"refine": 2}),
    "dspark": ("confidence=0.25", {"confidence": 0.25}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back(saved, kind):
    folder, (make, loader, of) = saved[kind][0], KINDS[kind]
    options, values = OPTIONS.get(kind, ("", {}))
    model = tiny_images.janus() if of == "janus" else model_of(of)
    loaded, name = registry.drafter(f"{folder}:{options}".rstrip(":"), model)
    assert name == kind and type(loaded) is loader and values.items() <= vars(loaded).items()
    assert kind != "distilled" or loaded.traits.levels == 3
    weights = {key: value.half().float() for key, value in make().head.state_dict().items()}
    torch.testing.assert_close(loaded.head.state_dict(), weights, rtol=0, atol=0)
    assert json.loads((folder / "provenance.json").read_text()) == {"seed": 1}


IMAGE = [
    ({"codes": 20}, "made for a target of codes 20, got a model of 24"), ({"hidden": 64}, "hidden size 64"),
    ({"vocab": 99}, "vocabulary 99, got a model of 24"), ({"target_layers": 7}, "number of layers 7"),
    ({"family": "emu3"}, "family 'emu3', got a model of 'janus'"), ({"kind": "eagle_head"}, "of another kind"),
    ({"colour": 1}, "'colour', expected "),
]  # fmt: skip
CHANGES = {
    "text": [
        ({"target_hidden": 64}, "hidden size 64"), ({"vocab": 97}, "vocabulary 97"),
        ({"family": "qwen2_vl"}, "'qwen2_vl'"), ({"target_layers": 9}, "number of layers 9"),
        ({"colour": 1}, "'colour'"), ({"kind": "other"}, "eagle_head"),
        ({"heads": "four"}, "config.json of .*: "), ({"heads": 5}, r"'imadpt.q' .* expected \(3, 5, 6\)"),
        ({"levels": 300_000_000}, "levels: got 300000000, expected a whole number from 1 to 1023"),
        ({"intermediate": 10**7}, r"down_proj.weight' .* has shape \(32, 48\), expected \(32, 10000000\)"),
        ({"feature_layers": [9]}, "feature_layers: got 9, expected a whole number from -3 to 3"),
        ({"rope_theta": float("nan")}, "rope_theta: got nan, expected a finite number above 0"),
        ({"structure": {"wide": 3}}, "structure: got {'wide': 3}, expected tree=chain, or a tree such as width=4"),
        ({"structure": {"tree": "x.json"}}, "structure: got"), ({"structure": "width=4"}, "structure: got 'width=4'"),
        ({"mrope_section": [1, 1]}, r"mrope_section: got \(1, 1\), which .* 8 rotary channels"),
    ],
    "image": [
        *IMAGE, ({"guided": 1}, "guided: got 1, expected true or false"), ({"rows": 10**7}, "'row.weight'"),
        ({"image_latents": 2}, "image_latents: got 2, which does not fit"),
    ],
    "distilled": [*IMAGE, ({"layers": 0}, "layers: got 0"), ({"guidance": 0}, "guidance: got 0")],
    "block": [
        ({"block": 1}, "block: got 1"), ({"layers": 3}, "layers.2"), ({"mask": 96}, "mask: got 96"),
        ({"feature_layers": []}, "expected at least one layer"), ({"kind": "eagle_head"}, "of another kind"),
        ({"selector": 3}, "lacks tensor .candidate_s"),
        ({"selector": 3, "markov": 5}, "selector: got 3 beside DSpark's"),
    ],
    "dspark": [({"confidence": False}, "confidence.linear"), ({"markov": 4}, "confidence.linear.weight|markov")],
    "upsampler": [({"layers": 100_000}, "layers: got 100000"), ({"layers": 3}, "lacks tensor 'small.2.bias'")],
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_each_has_its_sentence(saved, kind):
    folder, load = saved[kind]
    config = json.loads((folder / "config.json").read_text())
    for changes, sentence in CHANGES[kind]:
        assert re.search(sentence, outcome(folder, load, config | changes) or ""), (changes, sentence)


def without_heads(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != "heads"}))


def without_bias(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.bias"]
    save_file(tensors, folder / "model.safetensors")


def pickled(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def outward(folder):
    (folder / "model.safetensors").symlink_to((folder / "model.safetensors").rename(folder.parent / "elsewhere"))


def without_names(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["model.safetensors"]}))


FILES = {  # what is done to a folder
    "index": (without_names, "weight_map of .* expected file names"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "JSON"), "missing entry": (without_heads, "'heads'"),
    "missing tensor": (without_bias, "fc.bias"), "pickle": (pickled, "pickled weights"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"no tensors"), "safetensors"),
    "link": (outward, "inside the folder"), "no folder": (shutil.rmtree, "not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_broken_files_are_refused(saved, tmp_path, what):
    change, sentence = FILES[what]
    change(copy := shutil.copytree(saved["text"][0], tmp_path / "copy"))
    with raises_line(sentence):
        saved["text"][1](copy)


def test_another_target_is_refused(saved):
    with pytest.raises(ValueError, match="family 'llava', got a model of 'qwen2'"):
        EagleDrafter.from_pretrained(saved["text"][0], model_of("qwen2"))
