"""`visspec inspect`: what a checkpoint is and whether it fits, by headers alone, as the readers themselves judge."""

import json
import shutil
import warnings

import pytest
import torch

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
from visspec.io import checkpoint, included
from visspec.models import assistants
from visspec.models.layers import same_table
from visspec.models.published import NOT_READ

FOUND = {  # form, layers, convention, hidden states, vocabulary
    "eagle": ("eagle", [-1], "defaults", [-1], None),
    "msd-qwen2-vl": ("eagle", [-1], "defaults", [-1], None),
    "vispec": ("vispec", [-1], "defaults", [-1], None),
    "vispec-automodel-qwen2.5-vl": ("vispec", [-1], "defaults", [-1], None),
    "eagle3": ("eagle3", [0, 0, 0], "outputs", [1, 1, 1], 36),
    "speculators": ("eagle3", [1, 0], "inputs", [1, 0], 36),
    "z-lab": ("dflash", [1, 0], "outputs", [2, 1], None),
    "speculators-dflash": ("dflash", [1], "inputs", [1], 36),
    "z-lab-2": ("dflash2", [1, 0], "outputs", [2, 1], None),
    "dspark-gated": ("dspark", [0], "outputs", [1], None),
    "dspark-speculators": ("dspark", [1], "inputs", [1], 36),
    "dspark-deepspec": ("dspark", [0], "outputs", [1], None),
    "deepspec-dflash": ("dflash", [0], "outputs", [1], None),
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
            (llama(hidden_size=64) if name == "wide" else model_of(name)).config.save_pretrained(root / name)
            made[name] = str(root / name)
        return made[name]

    return of


@pytest.mark.parametrize("name", FOUND)
def test_a_published_form_is_named_and_fits_its_target_alone(tmp_path, name, targets):
    layout, options, family = layout_of(name)
    spec = named(saved(tmp_path / "head", *layout()), options)
    form, layers, convention, states, few = FOUND[name]
    ours, wide = targets(family), targets("wide")
    with Largest() as largest:
        alone, fitting, strange = inspect(spec), inspect(spec, ours), inspect(spec, wide)
    assert largest.found < 200, "no weights were read"
    for found in (alone, fitting, strange):
        assert (found.form, found.layers, found.convention, found.hidden_states) == (form, layers, convention, states)
        assert found.vocabulary == {"target": 96, "draft": few} and found.tensors["count"] == len(layout()[1])
        assert found.positions["theta"] in (5000.0, 10000.0)
    assert (alone.fits, alone.refused, fitting.fits, fitting.refused) == (None, None, True, None)
    with pytest.raises(ValueError) as caught:
        zoo.drafter(spec, llama(hidden_size=64))
    assert strange.fits is False and strange.refused == str(caught.value)


def own(folder):
    from tests.test_eagle_heads import make

    make("llava", "eagle3").save_pretrained(folder, {})
    return folder


def small(folder):
    llama(1).save_pretrained(folder)
    return folder


def test_drafters_of_ours_and_models_of_transformers(tmp_path, targets, monkeypatch):
    ours, wide, opened, opening = targets("llava"), targets("wide"), [], checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", lambda path, **given: opened.append(path) or opening(path, **given))
    for make_one, form in ((own, "eagle-head"), (small, "small-model")):
        folder = make_one(tmp_path / form)
        opened.clear()
        alone, found = inspect(folder), inspect(folder, ours)
        assert form == "small-model" or len(opened) == 2, "headers are read once an inspection"
        assert (alone.form, alone.fits, alone.refused, found.fits) == (form, None, None, True)
        assert alone.vocabulary["target"] == 96
    data = json.loads((tmp_path / "small-model" / "config.json").read_text())
    read = assistants.read(tmp_path / "small-model", data, torch.float32, empty=True)
    assert all(weight.is_meta for weight in read.parameters()), "no weights were read"
    assert (
        "made for a target of family 'llava', got a model of 'llama'" in inspect(tmp_path / "eagle-head", wide).refused
    )
    name = inspect("vispec", "captioner"), inspect("vispec", "captioner-emoji")
    assert [found.fits for found in name] == [True, False] and "vocabulary 164" in name[1].refused
    assert inspect("painter-eagle", "painter").fits and inspect("painter-eagle", "captioner").fits is False
    assert "has a config.json of another kind" in inspect("painter-upsampler").refused


@pytest.mark.parametrize(("drafter", "target", "form", "refused"), [
    ("painter-mar-drafter", "painter-mar", "mar", None), ("painter-var-small", "painter-var", "var", None),
    ("painter-lowres", "painter", "lowres", None), ("painter-emoji-lowres", "painter-emoji", "lowres", None),
    ("painter", "painter-lowres", "lowres", "got a sibling with a grid of (12, 12)"),
    ("painter-lowres", "painter-emoji", "lowres", "got a sibling with another tokenizer"),
    ("painter-mar-drafter", "painter-var", "mar", "drafts for models of 'mar_image' alone, got one of 'var_image'"),
    ("painter-var-small", "captioner", "var", "drafts for models of 'var_image' alone, got one of 'llava'"),
    ("painter-eagle", "painter-any-order", "image-eagle", "models of another type, got one of 'randar_image'"),
    ("painter-eagle", "painter-emoji", "image-eagle", "is made for a model with text_config.vocab_size 45, got 132"),
])  # fmt: skip
def test_image_models_that_draft_are_judged_without_weights(monkeypatch, drafter, target, form, refused):
    monkeypatch.setattr("visspec.models.folders.read_tensors", None)
    found = inspect(drafter, target)
    assert (found.form, found.fits) == (form, refused is None) and (refused or "") in (found.refused or "")
    compared = form == "lowres" or (form == "var" and found.fits)
    assert any("codebooks were compared by their sizes" in note for note in found.notes) == compared
    other = torch.empty(4, 2, device="meta")
    assert same_table(other, torch.ones(4, 2), 0.0) and not same_table(other, torch.ones(3, 2), 0.0)


def test_a_sibling_of_as_many_other_words_is_refused(tmp_path):
    folder = shutil.copytree(included.folder("painter-lowres"), tmp_path / "other")
    words = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(words.replace('"above"', '"beneath"'))
    assert "got a sibling with another tokenizer" in inspect(folder, "painter").refused


def test_an_image_model_of_other_steps_or_sizes_is_refused(tmp_path):
    for name, entry, value, sentence in (("painter-mar", "denoising_steps", 7, "denoising steps, expected"),):
        folder = shutil.copytree(included.folder(f"{name}-drafter"), tmp_path / f"{name}-{entry}")
        data = json.loads((folder / "config.json").read_text()) | {entry: value}
        (folder / "config.json").write_text(json.dumps(data))
        found = inspect(folder, name)
        assert found.fits is False and sentence in found.refused
    assert "has shape" in inspect(folder).refused


@pytest.mark.parametrize("name", FORMS)
def test_the_layer_in_a_targets_own_files(tmp_path, name):
    make_model, names = FORMS[name]
    model = make_model()
    tensors = published(model, names)
    saved_target(tmp_path / "whole", model, tensors)
    found = inspect(tmp_path / "whole")
    assert (found.form, found.layers, found.fits, found.refused) == ("mtp", [-1], True, None)
    model.config.save_pretrained(tmp_path / "other")
    assert inspect(tmp_path / "whole", str(tmp_path / "other" / "config.json")).fits
    lost = next(key for key in tensors if key.endswith("post_attention_layernorm.weight"))
    saved_target(tmp_path / "less", make_model(), {key: value for key, value in tensors.items() if key != lost})
    found = inspect(tmp_path / "less")
    assert (found.form, found.fits) == ("mtp", False)
    (missing,) = found.tensors["missing"]
    assert missing.endswith("post_attention_layernorm.weight") and f"lacks tensor '{missing}'" in found.refused


def test_an_image_drafter_of_others(tmp_path):
    found = inspect(lantern("llamagen", tmp_path / "head"))
    assert (found.form, found.layers, found.refused) == ("lantern", [-1], None) and found.vocabulary["target"] == 24


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_is_refused_by_name_with_what_to_do(tmp_path, name, targets):
    data, tensors = eagle_3()
    if name == "mask_hidden":
        tensors[name] = torch.zeros(1, 1, 96)
    elif name == "peagle":
        data |= {"speculators_model_type": name}
    elif name == "medusa_num_heads":
        data |= {name: 3}
    else:
        data["architectures"] = [name]
    folder, (form, what, instead) = saved(tmp_path / "head", data, tensors), NOT_READ[name]
    found = inspect(folder, targets("llava"))
    assert (found.form, found.fits) == (form, False)
    assert found.refused == f"drafter: {folder} is a checkpoint of {name!r}, {what}, expected {instead}"
    with pytest.raises(ValueError) as caught:
        zoo.drafter(folder, model_of("llava"))
    assert str(caught.value) == found.refused


@pytest.mark.parametrize(("layout", "form", "layers", "convention"), [
    (eagle_3, "eagle3", [0, 0, 0], "outputs"), (speculators_eagle_3, "eagle3", [1, 0], "inputs"),
    (z_lab, "dflash", [1, 0], "outputs"), (domino, "domino", [1, 0], "outputs"),
])  # fmt: skip
def test_a_configuration_alone_is_judged(tmp_path, targets, layout, form, layers, convention):
    (tmp_path / "config.json").write_text(json.dumps(layout()[0]))
    alone, found, strange = (inspect(tmp_path, name) for name in (None, targets("llava"), targets("wide")))
    assert (found.form, found.layers, found.convention, found.tensors) == (form, layers, convention, None)
    assert (alone.fits, found.fits, strange.fits, alone.refused) == (None, True, False, None)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "has pickled weights (pytorch_model.bin), expected .safetensors" in inspect(tmp_path).refused


def test_a_configuration_of_one_layer_needs_its_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(eagle_2()[0]))
    found = inspect(tmp_path)
    assert found.form is None and "may be an EAGLE head or a model of one layer" in found.refused


@pytest.mark.parametrize(("changes", "depth", "layers", "convention", "states"), [
    ({"eagle_config": None}, None, None, "defaults", None),
    ({"eagle_config": None}, 8, [2, 4, 5], "defaults", [2, 4, 5]),
    ({"eagle_config": None, "num_target_layers": 6}, None, [2, 3, 3], "defaults", [2, 3, 3]),
    ({AUX: [1, 3, 5]}, None, [1, 3, 5], "outputs", [2, 4, 6]), ({AUX: [2, 4, 6]}, 8, [2, 4, 6], "inputs", [2, 4, 6]),
    ({AUX: [2, 4, 8]}, 8, [2, 4, 8], "boundary", [2, 4, 9]), ({AUX: [1, 4, 7]}, 8, [1, 4, 7], "outputs", [2, 5, 8]),
])  # fmt: skip
def test_which_layers_are_read_by_which_convention(tmp_path, changes, depth, layers, convention, states):
    folder, target = saved(tmp_path / "head", *eagle_3(**changes)), None
    if depth:
        llama(num_hidden_layers=depth).config.save_pretrained(target := str(tmp_path / "target"))
    found = inspect(folder, target)
    assert (found.layers, found.convention, found.hidden_states) == (layers, convention, states)
    assert ("names a state after layer 8" in (found.refused or "")) == (states is not None and 8 in states)
    assert any("head:layers=2-4-6" in note for note in found.notes) == (convention == "inputs")


def test_layers_of_a_block_drafter_that_names_none(tmp_path):
    data, tensors = z_lab(dflash_config={"mask_token_id": 4})
    del data["num_target_layers"]
    found = inspect(folder := saved(tmp_path / "head", data, tensors))
    assert (found.layers, found.convention, found.refused) == (None, "defaults", None)
    llama(num_hidden_layers=8).config.save_pretrained(tmp_path / "target")
    found = inspect(folder, str(tmp_path / "target"))
    assert (found.layers, found.hidden_states, found.fits) == ([1, 5], [2, 6], True)


def test_tensors_that_lack_or_are_left_over_are_named(tmp_path):
    data, tensors = z_lab()
    for key in ("norm.weight", "fc.weight"):
        del tensors[key]
    found = inspect(saved(tmp_path / "head", data, tensors | {"layers.0.more": torch.ones(2)}))
    assert found.tensors["missing"] == ["fc.weight", "norm.weight"] and found.fits is None
    assert found.tensors["unexpected"] == ["layers.0.more"] and "lacks tensor 'fc.weight'" in found.refused


def test_options_are_those_of_the_drafter(tmp_path, targets):
    folder, ours = saved(tmp_path / "head", *eagle_2()), targets("llava")
    assert "does not tell what it sees of a picture" in inspect(folder, ours).refused
    assert inspect(f"{folder}:images=slots,width=3", ours).fits
    assert (
        "does not take {'images': 'slots', 'image': 'slots'}"
        in inspect(f"{folder}:images=slots,image=slots", ours).refused
    )


def test_layers_that_are_asked_for_are_told(tmp_path, targets):
    found = inspect(f"{saved(tmp_path / 'head', *eagle_3())}:layers=1-0-1", targets("llava"))
    assert (found.layers, found.convention, found.hidden_states, found.fits) == ([1, 0, 1], "inputs", [1, 0, 1], True)


def test_positions_are_told(tmp_path):
    data, tensors = eagle_3(rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})
    assert inspect(saved(tmp_path / "a", data, tensors)).positions == {
        "counted": "target", "rope_type": "default", "theta": 5000.0, "partial_rotary_factor": 1.0,
        "mrope_section": [2, 1, 1],
    }  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    found = inspect(saved(tmp_path / "b", *z_lab(rope_parameters=yarn | {"rope_theta": 9.0}))).positions
    assert (found["counted"], found["rope_type"], found["factor"], found["theta"]) == ("slots", "yarn", 4.0, 9.0)
    data, tensors = eagle_3(rope_parameters={"rope_type": "dynamic"})
    found = inspect(saved(tmp_path / "c", data, tensors))
    assert found.positions is None and "is 'dynamic', expected default, linear" in found.refused


@pytest.mark.parametrize("layout", [eagle_2, eagle_3, speculators_eagle_3, z_lab, domino, vispec])
def test_any_entry_may_be_anything(tmp_path, layout):
    """A checkpoint is judged, whatever its configuration says; an entry takes every third of the values, in turn."""
    data, tensors = layout()
    folder = saved(tmp_path / "head", data, tensors)
    parts = [data, *(value for value in data.values() if isinstance(value, dict))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in parts:
            for number, (name, before) in enumerate(list(part.items())):
                for value in JUNK[(number + 1) % 3 :: 3]:
                    part[name] = value
                    (folder / "config.json").write_text(json.dumps(data))
                    assert "\n" not in (inspect(folder).refused or "")
                part[name] = before


def test_a_repository_that_is_cached_is_read_there(cache, targets):  # noqa: F811
    cached(cache, "someone/llava-eagle3", *eagle_3())
    assert inspect("someone/llava-eagle3", targets("llava")).fits
    with pytest.raises(ValueError, match="no/where is not in the cache"):
        inspect("no/where")


def test_of_other_repositories_headers_alone_are_fetched(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    data, tensors = z_lab()
    (tmp_path / "config.json").write_text(json.dumps(data))
    found = {name: TensorInfo("F32", list(t.shape), (0, 4 * t.numel())) for name, t in tensors.items()}
    files = {"model.safetensors": SafetensorsFileMetadata({}, found)}
    asked = []

    def snapshot(name, allow_patterns=None, **more):
        if more.get("local_files_only"):
            raise OSError
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    whole = SafetensorsRepoMetadata(None, False, {}, files)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name: whole)
    judged = inspect("someone/dflash")
    assert asked == [["*.json"]]
    assert (judged.form, judged.refused, judged.tensors["count"]) == ("dflash", None, len(tensors))
    found.pop("norm.weight")
    assert inspect("someone/dflash").tensors["missing"] == ["norm.weight"]


def run(capsys, *argv):
    code = main(["inspect", *map(str, argv)])
    return (code, *capsys.readouterr())


def entries(**more):
    return lambda f: (f / "config.json").write_text(json.dumps(json.loads((f / "config.json").read_text()) | more))


def text(name, value):
    return lambda f: (f / name).write_bytes(value.encode() if isinstance(value, str) else value)


def index(**names):
    return text("model.safetensors.index.json", json.dumps({"weight_map": names}))


def outside(name):
    """A file of the folder becomes a link to one beside it."""
    return lambda f: (f / name).symlink_to((f / name).rename(f.parent / "moved"))


def header(**tensors):
    said = json.dumps(tensors).encode()
    return text("model.safetensors", len(said).to_bytes(8, "little") + said)


def pickled(f):
    (f / "model.safetensors").rename(f / "pytorch_model.bin")


def nothing(f):
    (f / "model.safetensors").unlink(), (f / "config.json").unlink()


def as_file(f):
    nothing(f), f.rmdir(), f.write_text("x")


CONFIG, LLAMA = "config.json", {"model_type": "llama"}
BAD = {  # what is done to a folder, the exit code, the sentence
    "gone": (lambda f: f.rename(f.parent / "other"), 2, "expected a folder, a hub id or the name"),
    "a file": (as_file, 2, "expected a folder, a hub id or the name"), "empty": (nothing, 2, "has no config.json"),
    "not JSON": (text(CONFIG, "{"), 2, "is not JSON"), "not text": (text(CONFIG, b"\xff\x00"), 2, "is not JSON"),
    "a list": (text(CONFIG, "[1]"), 2, "holds a list"), "deep": (text(CONFIG, '{"a":' * 10**5), 2, "is not JSON"),
    "huge": (text(CONFIG, " " * (17 << 20)), 2, "expected at most 16777216"),
    "long number": (text(CONFIG, '{"a": ' + "9" * 5000 + "}"), 2, "is not JSON"),
    "config links out": (outside(CONFIG), 2, "expected a file inside the folder"),
    "weights link out": (outside("model.safetensors"), 2, "expected a file inside the folder"),
    "truncated": (lambda f: text("model.safetensors", (f / "model.safetensors").read_bytes()[:999])(f), 2, "readable"),
    "no bytes": (text("model.safetensors", b""), 2, "is not a readable safetensors file"),
    "long header": (text("model.safetensors", b"\xff" * 8), 2, "is not a readable safetensors file"),
    "negative shape": (header(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}), 2, "is not a readable"),
    "no such bytes": (header(a={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}), 2, "is not a readable"),
    "index out": (index(a="../moved"), 2, "a file inside"), "index to /": (index(a="/etc/passwd"), 2, "inside"),
    "index with NUL": (index(a="a\0b"), 2, "inside"), "index of nothing": (index(a="b.safetensors"), 2, "expected th"),
    "index of numbers": (index(a=1), 2, "expected an object of file names"),
    "NaN": (entries(hidden_size=float("nan")), 0, "is nan, expected a whole number"),
    "infinite": (entries(rms_norm_eps=float("inf")), 0, "eps: got inf, expected a finite number above 0"),
    "negative": (entries(num_attention_heads=-4), 0, "heads: got -4, expected a whole number"),
    "pickled": (pickled, 0, "has pickled weights"),
}  # fmt: skip
BAD_MODELS = {  # the same of a model of transformers
    "NaN": (entries(vocab_size=float("nan")), "'vocab_size' expected int, got float (value: nan)"),
    "negative": (entries(hidden_size=-4), "could not be loaded"), "a list": (entries(model_type=[1]), "could not be"),
    "layers": (entries(num_hidden_layers=10**9), "got 1000000000"), "pickled": (pickled, "has pickled weights"),
}  # fmt: skip
BAD_TARGETS = {  # its config.json
    "not JSON": ("{", "is not JSON"), "null": ("null", "holds a NoneType"),
    "no type": ("{}", "model_type"), "NaN": (json.dumps({**LLAMA, "hidden_size": float("nan")}), "value: nan"),
    "negative": (json.dumps({**LLAMA, "hidden_size": -4}), "hidden size (-4)"),
    "layers": (json.dumps({**LLAMA, "num_hidden_layers": 10**9}), "num_hidden_layers: got 1000000000"),
    "wide": (json.dumps({**LLAMA, "hidden_size": 10**12}), "overflowed"),
    "code": ('{"model_type": "x", "auto_map": {"AutoConfig": "x.Y"}}', "describes no model"),
    "no decoder": ('{"model_type": "vit"}', "describes no model"),
}  # fmt: skip


def check_bad(tmp_path, capsys, argv, code, sentence):
    """One sentence, the exit code, and nothing written."""
    before, out = sorted(tmp_path.rglob("*")), tmp_path / "found.json"
    found, said, error = run(capsys, *argv, "--json", out)
    assert out.exists() == (code == 0) and sorted(p for p in tmp_path.rglob("*") if p != out) == before
    if code == 0:
        (error,) = (line for line in said.splitlines() if line.startswith("refused: "))
    assert (found, error.count("\n")) == (code, code // 2) and sentence in error


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_said_in_one_sentence(tmp_path, targets, capsys, name):
    spoil, code, sentence = BAD[name]
    spoil(folder := saved(tmp_path / "a" / "head", *eagle_3()))
    check_bad(tmp_path, capsys, [folder], code, sentence)
    (tmp_path / "found.json").unlink(missing_ok=True)
    check_bad(tmp_path, capsys, [folder, "--target", targets("llava")], code, sentence)


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_of_transformers_are_said_in_one_sentence(tmp_path, targets, capsys, name):
    spoil, sentence = BAD_MODELS[name]
    spoil(folder := small(tmp_path / "small"))
    check_bad(tmp_path, capsys, [folder, "--target", targets("llava")], 0, sentence)


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_bad_targets_are_said_in_one_sentence(tmp_path, capsys, name):
    config, sentence = BAD_TARGETS[name]
    folder = saved(tmp_path / "head", *eagle_3())
    (tmp_path / "target").mkdir()
    text(CONFIG, config)(tmp_path / "target")
    check_bad(tmp_path, capsys, [folder, "--target", tmp_path / "target"], 2, sentence)


def test_options_of_the_shape_are_judged(tmp_path, targets):
    folder = saved(tmp_path / "head", *eagle_3())
    assert "tree: got" in inspect(f"{folder}:tree=x", targets("llava")).refused
    assert inspect(f"{folder}:tree=chain", targets("llava")).fits


def test_the_command(tmp_path, targets, capsys):
    folder, out = saved(tmp_path / "head", *eagle_3()), tmp_path / "found.json"
    code, said, _ = run(capsys, folder, "--target", targets("llava"), "--json", out)
    found = json.loads(out.read_text())
    assert code == 0 and found.keys() >= {"form", "layers", "convention", "fits", "refused"}
    assert (found["form"], found["layers"], found["convention"]) == ("eagle3", [0, 0, 0], "outputs")
    assert (found["fits"], found["refused"]) == (True, None)
    for line in (f"{folder}: eagle3", "layers: [0, 0, 0] (outputs), hidden states [1, 1, 1]",
                 "vocabulary: 96 ids, 36 of them drafted", f"verdict: fits {targets('llava')}"):  # fmt: skip
        assert line in said.splitlines()
    code, said, _ = run(capsys, folder, "--target", targets("wide"))
    assert code == 0 and "refused: drafter: made for a target of hidden size 32" in said
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"xx")
    for argv, sentence in (
        (["nothing"], "drafter: got 'nothing', expected a folder, a hub id or the name of an included drafter"),
        ([tmp_path / "empty"], "has no config.json"), ([tmp_path / "broken"], "is not a readable safetensors file"),
        ([folder, "--target", "nothing"], "target: got 'nothing', expected a folder, a hub id, a config.json"),
        ([folder, "--target", "painter-eagle"], "describes no model of transformers"),
    ):  # fmt: skip
        code, _, line = run(capsys, *argv)
        assert code == 2 and sentence in line and line.count("\n") == 1
