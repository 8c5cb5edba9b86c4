"""Checkpoints of drafters are not believed: every configuration loads, or is refused in one sentence, before memory is
asked for.
"""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import visspec
from tests import tiny_images
from tests.doubles import one_sentence
from tests.tiny import model_of
from visspec.api import zoo
from visspec.models.block.diffusion_trained import DiffusionDrafter
from visspec.models.block.trained import BlockDrafter
from visspec.models.distilled.drafter import DistilledDrafter
from visspec.models.drafting.checkpoint import read_config, write
from visspec.models.drafting.structure import StopCriteria
from visspec.models.eagle.drafter import FeatureDrafter
from visspec.models.eagle.feature_head import FeatureHead
from visspec.models.eagle.image_drafter import ImageFeatureDrafter
from visspec.models.image_codes.families import family_of
from visspec.models.lowres import drafter as lowres
from visspec.models.lowres.upsampler import Upsampler, UpsamplerConfig


class Largest(TorchDispatchMode):
    """The largest tensor that is really made, in numbers."""

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
    "text": (lambda: FeatureDrafter.for_model(model_of("llava"), image_latents=2), FeatureDrafter, "llava"),
    "image": (lambda: ImageFeatureDrafter.for_model(janus()), ImageFeatureDrafter, "janus"),
    "distilled": (lambda: DistilledDrafter.for_model(janus(), layers=1), DistilledDrafter, "janus"),
    "block": (lambda: BlockDrafter.for_model(model_of("llava"), **BLOCK), BlockDrafter, "llava"),
    "dspark": (lambda: BlockDrafter.for_model(model_of("llava"), **BLOCK, markov=5, confidence=True), BlockDrafter,
               "llava"),
    "diffusion": (lambda: DiffusionDrafter.for_model(model_of("llava"), **BLOCK), DiffusionDrafter, "llava"),
}  # fmt: skip


@pytest.fixture(scope="module")
@torch.inference_mode(False)
def saved(tmp_path_factory):
    """A checkpoint of each kind: its folder and how it is loaded."""
    root = tmp_path_factory.mktemp("drafters")
    write(root / "upsampler", Upsampler(UpsamplerConfig(tiny_images.CODES, width=8, layers=2)), {})
    found = {"upsampler": (root / "upsampler", lambda folder: lowres.load_upsampler(folder, janus()))}
    for kind, (make, loader, of) in KINDS.items():
        make().save_pretrained(root / kind, {"seed": 1}, torch.float16)
        target = janus() if of == "janus" else model_of(of)
        found[kind] = root / kind, partial(loader.from_pretrained, target=target)
    return found


def outcome(folder, load, config):
    """What becomes of a folder with this configuration: None, or the sentence that refuses it."""
    before = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        with Largest() as largest:
            load(folder)
        return None
    except ValueError as error:
        said = str(error)
        assert said and "\n" not in said and len(said) < 600, said
        return said
    finally:
        (folder / "config.json").write_text(before)
        assert largest.found < 1_000_000, "nothing near what it asks for was allocated"


OPTIONS = {  # of some kinds at loading, and what they become
    "distilled": ("levels=3,refine=2", {"refine": 2}), "diffusion": ("steps=2", {"steps": 2}),
    "dspark": ("confidence=0.25", {"stop": StopCriteria(confidence=0.25)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back(saved, kind):
    folder, (make, loader, of) = saved[kind][0], KINDS[kind]
    options, values = OPTIONS.get(kind, ("", {}))
    loaded, name = zoo.drafter(
        f"{folder}:{options}".rstrip(":"), tiny_images.janus() if of == "janus" else model_of(of)
    )
    assert name == kind and type(loaded) is loader and values.items() <= vars(loaded).items()
    assert kind != "distilled" or loaded.traits.levels == 3
    weights = {key: value.half().float() for key, value in make().head.state_dict().items()}
    torch.testing.assert_close(loaded.head.state_dict(), weights, rtol=0, atol=0)
    assert json.loads((folder / "provenance.json").read_text()) == {"seed": 1}


HUGE = {
    "text": ["levels", "intermediate", "hidden", "vocab", "heads", "image_latents", "target_layers"],
    "image": ["levels", "intermediate", "rows", "columns", "codes", "vocab", "heads", "hidden"],
    "upsampler": ["codes", "width", "layers", "factor"],
}


@pytest.mark.parametrize("value", [10**9, 300_000_000, 10**18, 1e9, float("inf"), float("nan"), 0, -1, "8", True, [8]])
@pytest.mark.parametrize("kind", HUGE)
def test_sizes_that_cannot_be(saved, kind, value):
    folder, load = saved[kind]
    config = json.loads((folder / "config.json").read_text())
    assert outcome(folder, load, config) is None
    for name in HUGE[kind]:
        assert outcome(folder, load, config | {name: value}), name


def wrong(**values):
    return [({name: value}, f"{name}: got .*, expected") for name, value in values.items()]


IMAGE = [
    ({"codes": 20}, "made for a target of codes 20, got a model of 24"), ({"hidden": 64}, "hidden size 64"),
    ({"vocab": 99}, "vocabulary 99, got a model of 24"), ({"target_layers": 7}, "number of layers 7"),
    ({"family": "emu3"}, "family 'emu3', got a model of 'janus'"), ({"kind": "feature_drafter"}, "of another kind"),
    ({"colour": 1}, "'colour', expected the fields of"),
]  # fmt: skip
CHANGES = {
    "text": [
        ({"hidden": 64}, "hidden size 64"), ({"vocab": 97}, "vocabulary 97"), ({"family": "qwen2_vl"}, "'qwen2_vl'"),
        ({"target_layers": 9}, "number of layers 9"), ({"colour": 1}, "'colour'"), ({"heads": "four"}, "heads"),
        ({"kind": "other"}, "feature_drafter"), ({"levels": 0}, "expected"), ({"image_latents": -1}, "expected"),
        ({"heads": 0}, "heads: got 0, expected a whole number from 1 to 16777216"),
        ({"heads": 5}, "heads: got 5, expected an even share of the hidden size 32"),
        ({"levels": 300_000_000}, "levels: got 300000000, expected a whole number from 1 to 1023"),
        ({"intermediate": 1e9}, "intermediate: got 1000000000.0, expected a whole number"),
        ({"intermediate": 10**7}, r"tensor 'down.weight' .* has shape \(32, 48\), expected \(32, 10000000\)"),
        ({"image_latents": 10**6}, r"tensor 'adaptor.queries' .* has shape \(3, 4, 8\), expected \(1000001, 4, 8\)"),
        ({"feature_layers": [9]}, "feature_layers: got 9, expected a whole number from -3 to 2"),
        ({"feature_layers": []}, r"feature_layers: got \(\), expected at least one layer"),
        ({"feature_layers": "ab"}, "feature_layers: got 'ab', expected a list of at most 1024 whole numbers"),
        ({"image_ids": [1] * 2000}, r"image_ids: got \[1, 1, .*\.\.\., expected a list of at most 1024"),
        ({"rope_theta": float("nan")}, "rope_theta: got nan, expected a finite number above 0"),
        ({"mrope_section": [1, 1]}, r"mrope_section: got \(1, 1\), expected numbers that sum to 4"),
        ({"family": ["llava"]}, r"family: got \['llava'\], expected a name"),
        ({"x" * 500: 1}, "has the unknown entry 'xxx"),
    ],
    "image": [
        *IMAGE, ({"guided": 1}, "guided: got 1, expected true or false"),
        ({"guidance": float("inf")}, "guidance: got inf, expected a finite number"), ({"rows": 10**7}, "'row.weight'"),
        *wrong(codes=0, rows=0, columns=-1, guidance=0), ({"codes": 25}, "codes, .* got 25, 0, .*expected at most 24"),
        ({"image_latents": 2}, "codes, image_latents, .* got 24, 2, .*expected"),
    ],
    "distilled": [
        *IMAGE, ({"codes": 25}, "codes: got 25, expected a whole number from 1 to 24"),
        *wrong(codes=0, rows=-1, columns=0, hidden=0, heads=5, layers=0, levels=1024, guidance=0, target_layers=1.5,
               temperature=float("inf"), rope_theta="x", family=3, intermediate=True),
    ],
    "block": [
        ({"vocab": 97}, "vocabulary"), ({"block": 1}, "block: got 1"), ({"layers": 3}, "layers.2"),
        ({"feature_layers": [9]}, "feature_layers: got"), ({"feature_layers": []}, "expected at least one layer"),
        ({"mask": 96}, "mask: got 96"), ({"markov": 3}, "markov"), ({"kv_heads": 3}, "kv_heads: got 3"),
        ({"kind": "eagle_head"}, "of another kind"), ({"selector": 3}, "lacks tensor .candidate_s"),
        ({"selector": -1}, "selector: got -1"),
        ({"selector": 3, "markov": 5}, "selector: got 3 beside DSpark's heads"),
        ({"selector": 3, "group": 5}, "conv_group_size: got 5, expected a divisor of the hidden size 32"),
    ],
    "dspark": [
        ({"confidence": 1}, "confidence: got 1, expected true or false"), ({"confidence": False}, "confidence.linear"),
        ({"markov": 4}, "confidence.linear.weight|markov"),
    ],
    "diffusion": [
        ({"vocab": 97}, "vocabulary"), ({"hidden": 16}, "hidden size"), ({"layers": 3}, "layers.2"),
        ({"mask": 96}, "mask: got"), ({"block": 0}, "block: got 0"), ({"heads": 3}, "heads: got 3"),
        ({"family": "llama"}, "family"), ({"kind": "block_drafter"}, "of another kind"),
    ],
    "upsampler": [
        ({"layers": 100_000}, "layers: got 100000, expected a whole number from 1 to 256"),
        ({"layers": 3}, "lacks tensor 'small.2.bias'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_each_has_its_sentence(saved, kind):
    folder, load = saved[kind]
    config = json.loads((folder / "config.json").read_text())
    for changes, sentence in CHANGES[kind]:
        assert re.search(sentence, outcome(folder, load, config | changes) or ""), (changes, sentence)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.integers(), st.floats(), st.text(max_size=4),
    st.sampled_from([2**31, 2**62, 10**9, 10**30, 1e9, -0.0]), st.lists(st.integers(-9, 99), max_size=4),
    st.lists(st.one_of(st.none(), st.floats(), st.text(max_size=2)), max_size=3), st.dictionaries(st.text(), st.none()),
)  # fmt: skip


def load_changed(saved, data, kind):
    folder, load = saved[kind]
    config = json.loads((folder / "config.json").read_text())
    for name in data.draw(st.lists(st.sampled_from([*config, "other"]), min_size=1, max_size=3, unique=True)):
        if data.draw(st.integers(0, 5)):
            config[name] = data.draw(ODD)
        else:
            config.pop(name, None)
    outcome(folder, load, config)


@given(data=st.data(), kind=st.sampled_from(list(HUGE)))
def test_any_configuration_loads_or_is_refused_in_a_sentence(saved, data, kind):
    load_changed(saved, data, kind)


@pytest.mark.nightly
@settings(max_examples=600, suppress_health_check=list(HealthCheck))
@given(data=st.data(), kind=st.sampled_from(list(HUGE)))
def test_six_hundred_configurations(saved, data, kind):
    load_changed(saved, data, kind)


@pytest.mark.parametrize(
    "weight_map", [[], ["model.safetensors"], None, "model.safetensors", {"a": 3}, {"a": ["b"]}, 7]
)
def test_an_index_that_maps_nothing(saved, tmp_path, weight_map):
    folder, load = saved["text"]
    copy = shutil.copytree(folder, tmp_path / "copy")
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with one_sentence(r"weight_map of .* expected an object of file names"):
        load(copy)
    index.write_text(json.dumps({"weight_map": {name: "model.safetensors" for name in ("a", "b")}}))
    load(copy)


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


FILES = {  # what is done to a folder
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "JSON"), "missing entry": (without_heads, "'heads'"),
    "missing tensor": (without_bias, "fc.bias"), "pickle": (pickled, "pickled weights"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"no tensors"), "safetensors"),
    "link": (outward, "inside the folder"), "no folder": (shutil.rmtree, "not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_broken_files_are_refused(saved, tmp_path, what):
    change, sentence = FILES[what]
    change(copy := shutil.copytree(saved["text"][0], tmp_path / "copy"))
    with one_sentence(sentence):
        saved["text"][1](copy)


def test_another_target_is_refused(saved):
    with pytest.raises(ValueError, match="family 'llava', got a model of 'qwen2'"):
        FeatureDrafter.from_pretrained(saved["text"][0], model_of("qwen2"))
    with pytest.raises(ValueError, match=r"captioner|vispec"):
        visspec.accelerate(model_of("llava"), "vispec")


def test_headers_are_read_before_weights(saved, tmp_path):
    """A tensor too many, or of another shape, is found without reading any."""
    folder, load = saved["text"]
    for change in ({"more": torch.zeros(3_000_000)}, {"fc.bias": torch.zeros(3_000_000)}):
        copy = shutil.copytree(folder, tmp_path / next(iter(change)))
        save_file(load_file(copy / "model.safetensors") | change, copy / "model.safetensors")
        assert next(iter(change)) in outcome(copy, load, json.loads((copy / "config.json").read_text()))


def test_a_checkpoint_that_drafts_deeper_than_any_draft_is_refused_by_accelerate(saved, tmp_path):
    copy = shutil.copytree(saved["text"][0], tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"levels": 1024}))
    with pytest.raises(ValueError, match="levels: got 1024, expected a whole number from 1 to 1023"):
        visspec.accelerate(model_of("llava"), str(copy))
    with pytest.raises(ValueError, match="levels: got 300000000"):
        visspec.accelerate(model_of("llava"), str(saved["text"][0]), levels=300_000_000)
    assert read_config(saved["text"][0], FeatureHead).levels == 8
