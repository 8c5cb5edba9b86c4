"""A captioner whose language model comes from `make real`, in the same form around a tiny random language model."""

import json
import shutil

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import visspec
from tests.tiny import llama
from visspec.api import loading
from visspec.api.captions import prepare
from visspec.io import included

NAME = "captioner-smollm2"
SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<empty_output>": 16}
PROJECTOR = {"linear_1.weight": (32, 128), "linear_1.bias": (32,), "linear_2.weight": (32, 32), "linear_2.bias": (32,)}


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """Folders as in a clone: parts with random weights, the tower, and a language model with its words."""
    zoo, real = tmp_path / "models" / "zoo", tmp_path / "real"
    shutil.copytree(included.folder(NAME), zoo / NAME)
    (zoo / "captioner").symlink_to(included.folder("captioner"))
    language = llama(tie_word_embeddings=True, hidden_size=32, vocab_size=64)
    language.save_pretrained(real / "smollm2")
    words = SPECIAL | {f"word{i}": i for i in range(64) if i not in SPECIAL.values()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(real / "smollm2" / "tokenizer.json"))
    config = json.loads((zoo / NAME / "config.json").read_text())
    config["text_config"] = language.config.to_dict() | {"architectures": None}
    (zoo / NAME / "config.json").write_text(json.dumps(config))
    tensors = {f"multi_modal_projector.{name}": torch.randn(shape) for name, shape in PROJECTOR.items()}
    for name, weight in language.model.named_parameters():
        if name.endswith("_proj.weight"):
            stem, (rows, columns) = f"language_model.model.{name.removesuffix('.weight')}", weight.shape
            tensors |= {f"{stem}.lora_A": torch.randn(2, columns), f"{stem}.lora_B": torch.randn(rows, 2) / 20}
    save_file(tensors, zoo / NAME / "model.safetensors")
    monkeypatch.setattr(included, "FOLDER", zoo)
    monkeypatch.setattr(included, "PUBLISHED", real)
    return zoo, real


def test_weights_are_those_of_the_parts(zoo):
    model, _ = loading.load(NAME)
    folders = [zoo[1] / "smollm2", zoo[0] / "captioner", zoo[0] / NAME]
    language, tower, own = (load_file(folder / "model.safetensors") for folder in folders)
    assert isinstance(model, tf.LlavaForConditionalGeneration) and model.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        stem, published = name.removesuffix(".weight"), name.removeprefix("model.")
        if name.startswith("model.language_model."):
            stem = stem.replace("model.language_model.", "language_model.model.")
            expected = language[name.replace("model.language_model.", "model.")]
            if f"{stem}.lora_A" in own:
                expected = expected + own[f"{stem}.lora_B"] @ own[f"{stem}.lora_A"]
            torch.testing.assert_close(tensor, expected)
        elif name != "lm_head.weight":
            torch.testing.assert_close(tensor, (tower | own)[published].float())
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("count", [1, 4])
def test_captions_equal_generate(zoo, count):
    model, processor = loading.load(NAME)
    images = included.scenes("shapes").images(count)
    inputs = prepare(processor, images, ["word20", "word21 word22 word23", "word24", "word25 word26"][:count], model)
    assert (inputs["input_ids"] == 16).sum() == 36 * count
    options = {"max_new_tokens": 24, "do_sample": False}
    stock = model.generate(**inputs, **options)
    assert torch.equal(visspec.accelerate(model).generate(**inputs, **options), stock)
    other = model.generate(**inputs | {"pixel_values": -inputs["pixel_values"]}, **options)
    assert not torch.equal(other, stock), "the picture is seen"


def test_rewritten_if_parts_are_newer(zoo):
    folder, weights = included.check("model", NAME), zoo[0] / NAME / "model.safetensors"
    first = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights)
    second = load_file(included.check("model", NAME) / "model.safetensors")
    name = "multi_modal_projector.linear_1.bias"
    assert torch.equal(second[name], 2 * first[name])
    assert [path.name for path in zoo[1].iterdir() if path.name != "smollm2"] == [NAME]


def test_missing_parts_message(zoo):
    (zoo[0] / NAME / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"^model: {NAME} has no weights yet. Its script makes them: .*/train.py.$"):
        loading.load(NAME)
    shutil.rmtree(zoo[1] / "smollm2")
    with pytest.raises(ValueError, match=rf"^model: {NAME} is built around smollm2, which is not in .*Run `make real`"):
        loading.load(NAME)
