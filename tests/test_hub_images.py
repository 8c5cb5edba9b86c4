"""Image models by the hub ids that people use, from the cache of huggingface_hub, and ids in their authors' form."""

import json

import pytest
import transformers as tf

from tests import tiny_images as tiny
from tests.doubles import raises_line
from visspec import ImagePipeline
from visspec.api import loading
from visspec.cli.main import main
from visspec.models.chameleon.target import PromptStyle


def emu3(folder):
    tiny.emu3().save_pretrained(folder)
    tiny.emu3_processor().save_pretrained(folder)


def anole(folder):
    tiny.chameleon().save_pretrained(folder)
    tokenizer = tiny.word_tokenizer(
        tiny.CHAMELEON, bos_token="<s>", pad_token="<pad>", eos_token="</s>", boi_token="<racm3:break>",
        eoi_token="<eoss>", image_token="<image>", sep_token="<reserved08706>",
    )  # fmt: skip
    tf.ChameleonProcessor(tf.ChameleonImageProcessor(), tokenizer, image_seq_length=4).save_pretrained(folder)


def glm_image(folder):
    tiny.glm_diffusion().save_pretrained(folder)


IDS = {
    "deepseek-community/Janus-Pro-1B": (tiny.painter, "a photo of a red circle", {}),
    "BAAI/Emu3-Gen-hf": (emu3, "a red cube", {"height": 6, "width": 8}),
    "leloy/Anole-7b-v0.1-hf": (anole, "a red cube", {}),
    "zai-org/GLM-Image": (glm_image, "a red cube", {"height": 64, "width": 96}),
}


def repository(hub, name: str):
    """A snapshot's folder in a cache of the hub, and nothing else is asked."""
    root = hub / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc")
    folder = root / "snapshots" / "abc"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", IDS)
def test_hub_ids_draw(name, cache, tmp_path):
    save, prompt, size = IDS[name]
    save(repository(cache, name))
    parts = {"style": PromptStyle("{}", guidance=3.0, size=64)} if save is anole else {}  # fewer codes
    pipe = ImagePipeline.from_pretrained(name, parts=parts)
    result = pipe(prompt, seed=0, output_type="latent", **size).tokens[0]
    assert result.tolist() == pipe(prompt, seed=0, output_type="latent", drafter=None, **size).tokens[0].tolist()
    if name.startswith("deepseek"):
        call = ["generate", prompt, "--model", name, "--out", str(tmp_path / "a.png")]
        assert main(call) == 0 and (tmp_path / "a.png").is_file()


@pytest.mark.parametrize("name, kind, instead", [
    ("deepseek-ai/Janus-Pro-1B", "multi_modality", "deepseek-community/Janus-Pro-1B"),
    ("BAAI/Emu3-Gen", "Emu3", "BAAI/Emu3-Gen-hf"),
])  # fmt: skip
def test_hub_id_suggestion(name, kind, instead, cache, capsys):
    folder = repository(cache, name)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    with raises_line(f"authors' form. Use {instead}"):
        ImagePipeline.from_pretrained(str(folder))
    sentence = f"model: {name} is in its authors' form. Use {instead}, in transformers' form."
    for load in (ImagePipeline.from_pretrained, loading.load):
        with raises_line(sentence):
            load(name)
    for command in (["generate", "a cat"], ["caption", "x.png"], ["bench", "image"]):
        assert main([*command, "--model", name]) == 2 and sentence in capsys.readouterr().err


def test_pickle_error_names_command(tmp_path, capsys):
    (tmp_path / "t2i_XL.pt").write_bytes(b"")
    for where in (tmp_path, tmp_path / "t2i_XL.pt"):
        with raises_line("holds weights in their authors' layout. `visspec convert` makes a folder of them"):
            ImagePipeline.from_pretrained(str(where))
        assert main(["generate", "a cat", "--model", str(where)]) == 2 and "visspec convert" in capsys.readouterr().err


def test_unknown_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blobby"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with raises_line("model: .* is of the type 'blobby', which transformers .* does not know. A newer one may"):
        ImagePipeline.from_pretrained(str(tmp_path))
