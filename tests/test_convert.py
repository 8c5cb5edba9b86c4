"""`visspec convert`: random weights in published layouts become folders that every command loads."""

import argparse
import json

import numpy as np
import pytest
import torch
import transformers as tf

from tests import test_lantern_drafters as lantern
from tests import tiny_images as tiny
from tests.doubles import refused
from tests.layouts import (
    NEXTSTEP,
    TINY_KL,
    chameleon_vq_names,
    filled,
    gpt_names,
    kl_names,
    llamagen_vq_names,
    mar_names,
    nextstep_names,
)
from tests.test_continuous_nets import SMALL as MAR
from tests.test_hub_images import anole
from tests.test_infinity import BITS, vae_names
from tests.test_infinity import published as infinity_tensors
from tests.test_var_nets import SMALL as VAR
from tests.test_var_nets import TINY, vq_names
from tests.test_var_nets import published as var_tensors
from visspec import ImagePipeline
from visspec.api import convert as conversion
from visspec.api.convert import convert
from visspec.cli.main import main
from visspec.io.checkpoint import read_tensors
from visspec.models.chameleon.target import PromptStyle
from visspec.models.codecs.vq_layout import load_llamagen_vq, load_taming_vq
from visspec.models.image_codes.text_features import T5Features
from visspec.models.llamagen.layout import load_llamagen

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "cube", "on", "grass"]


def t5(folder, width: int = 12):
    torch.manual_seed(0)
    config = tf.T5Config(vocab_size=len(WORDS), d_model=width, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    tf.T5EncoderModel(config).save_pretrained(folder)
    tiny.word_tokenizer(WORDS, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return folder


def llamagen(home, caption: bool, queries: bool = False, codes: int = 24):
    torch.manual_seed(1)
    sized = {"tok_embeddings.weight": (codes, 32), "output.weight": (codes, 32)}
    tensors = filled(gpt_names(caption) | sized, 0.3)
    if queries:
        tensors["pos_instruct_embeddings"] = torch.randn(1, 32)
    torch.save({"model": tensors, "args": argparse.Namespace(lr=1.0)}, home / "t2i_XL.pt")
    vq = filled(llamagen_vq_names())
    vq["quantize.embedding.weight"] = torch.randn(codes, *vq["quantize.embedding.weight"].shape[1:])
    torch.save({"model": vq}, home / "vq_ds16_t2i.pt")
    return ["t2i_XL.pt", "--vq", "vq_ds16_t2i.pt", "--size", "8", "--heads", "4"]


def texts(home):
    return [*llamagen(home, True), "--text", str(t5(home / "t5"))]


def var(home):
    torch.save({"trainer": {}, **var_tensors(VAR)}, home / "var_d16.pth")
    torch.save(filled(vq_names(TINY), 0.2), home / "vae.pth")
    return ["var_d16.pth", "--vae", "vae.pth"]


def mar(home):
    weights = filled(mar_names(MAR), 0.1)
    torch.save({"model": {n: t + 1 for n, t in weights.items()}, "model_ema": weights, "epoch": 4}, home / "mar.pth")
    torch.save({"model": filled(kl_names(*TINY_KL), 0.1)}, home / "kl16.ckpt")
    return ["mar.pth", "--vq", "kl16.ckpt", "--heads", "4"]


def infinity(home):
    torch.save(infinity_tensors(BITS, 2), home / "infinity_2b.pth")
    torch.save(filled(vae_names(True), 0.2), home / "vae.pth")
    return ["infinity_2b.pth", "--vq", "vae.pth", "--size", "256", "--text", str(t5(home / "t5", 8))]


def nextstep(home, name: str = "latent_patch_size"):
    for folder, tensors, more in (
        ("nextstep", nextstep_names(), {}),
        ("vae", kl_names(*TINY_KL[:-1], (), quantised=False), {"scaling_factor": 0.5, "shift_factor": 0.1}),
    ):
        (home / folder).mkdir()
        torch.save(filled(tensors, 0.1), home / folder / "checkpoint.pt")
        config = {key: value for key, value in NEXTSTEP.items() if key != "latent_patch_size"} | {name: 2}
        (home / folder / "config.json").write_text(json.dumps(config | more))
    names = ["<pad>", "</s>", "<unk>", "<|image_area|>4*4", "a", "red", "cube"]
    tiny.word_tokenizer(names, pad_token="<pad>", eos_token="</s>").save_pretrained(home / "nextstep")
    return ["nextstep", "--vae", "vae"]


CASES = {
    "llamagen": (texts, "a red cube", {"top_k": 0}),
    "llamagen of classes": (lambda home: llamagen(home, False), "7", {}),
    "randar": (lambda home: llamagen(home, False, queries=True), "7", {}), "var": (var, "3", {}),
    "mar": (mar, "2", {"guidance_scale": 1.0}), "infinity": (infinity, "a red cube", {}),
    "nextstep": (nextstep, "a red cube", {"height": 16, "width": 16}),
    "nextstep 1.1": (lambda home: nextstep(home, "patch_size"), "a red cube", {"height": 16, "width": 16}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_published_files_to_folder(case, tmp_path, monkeypatch, capsys):
    """By the command, by Python and by `generate`; saving the pipeline again loses nothing."""
    monkeypatch.chdir(tmp_path)
    make, prompt, options = CASES[case]
    assert main(["convert", case.split()[0], *make(tmp_path), "--out", "made"]) == 0, capsys.readouterr().err
    assert {file.name for file in (tmp_path / "made").iterdir()} >= {"config.json", "model.safetensors"}
    pipe = ImagePipeline.from_pretrained("made")
    out = pipe(prompt, seed=3, **options)
    assert out.images[0].size[0] > 4
    pipe.save_pretrained("again")
    assert ImagePipeline.from_pretrained("again")(prompt, seed=3, **options).images[0] == out.images[0]
    named = {f"--{key.replace('_', '-')}": str(value) for key, value in options.items() if key != "top_k"}
    argv = ["generate", prompt, "--model", "made", "--out", "a.png", "--seed", "3"]
    assert main([*argv, *(part for pair in named.items() for part in pair)]) == 0
    assert sorted(p.name for p in tmp_path.glob(".convert-*")) == []


def test_converted_llamagen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights, _, vq, *_ = texts(tmp_path)
    convert("llamagen", weights, "made", vq=vq, text="t5", size=8, heads=4)
    net = load_llamagen(conversion.safetensors_of(tmp_path / weights, tmp_path / "a"), 4, 4)
    parts = {"codec": load_llamagen_vq(conversion.safetensors_of(tmp_path / vq, tmp_path / "b"))}
    plain = ImagePipeline(net, T5Features.from_pretrained("t5"), parts=parts)
    options = {"seed": 5, "drafter": None, "guidance_scale": 3.0, "top_k": 7}
    words = ["a red cube", "blue"]
    result = ImagePipeline.from_pretrained("made")(words, **options)
    assert result.images == plain(words, **options).images
    stored = read_tensors(tmp_path / "made")
    assert all(torch.equal(stored[f"net.{name}"], value) for name, value in net.state_dict().items())


def test_lantern_drafter_in_folder(tmp_path, monkeypatch):
    """Presets that need a trained drafter take the model's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(lantern.CONFIGS["llamagen"], "caption_dim", 12)
    folder = lantern.published("llamagen", tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    call = ["convert", "llamagen", *texts(tmp_path), "--out", "made"]
    assert main([*call, "--drafter", "drafter"]) == 0
    assert main(["convert", "lantern", "drafter", "--out", "alone"]) == 0
    pipe = ImagePipeline.from_pretrained("made")
    options = {"seed": 5, "guidance_scale": 3.0, "output_type": "latent"}
    method = {"drafter": "image-eagle:tree=dynamic", "acceptance": "lantern:k=8,delta=0.1"}  # the preset, of 24 codes
    result = pipe("a red cube", **method, **options)
    assert result.stats[0].faults == 0 and result.stats[0].guarantee == "approximate"
    exact = pipe("a red cube", preset="drafter", **options)
    plain = pipe("a red cube", preset="plain", **options)
    assert torch.equal(exact.tokens[0], plain.tokens[0])
    with pytest.raises(ValueError, match="drafter: 'distilled' must be trained first"):
        pipe("a red cube", drafter="distilled", **options)
    again = pipe("A red  cube", drafter="alone:levels=8", acceptance="exact", **options)  # captions are lower case
    assert torch.equal(again.tokens[0], plain.tokens[0])
    pipe.save_pretrained("saved")
    saved = ImagePipeline.from_pretrained("saved")("a red cube", preset="drafter", **options)
    assert torch.equal(saved.tokens[0], plain.tokens[0])


def test_anole_gets_its_codec(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    anole(tmp_path / "anole-hf")
    vq = filled(chameleon_vq_names())
    torch.save({"state_dict": vq}, "other.ckpt")
    vq["quantize.embedding.weight"] = torch.randn(tiny.CODES, *vq["quantize.embedding.weight"].shape[1:])
    torch.save({"state_dict": vq}, "vqgan.ckpt")
    call = ["convert", "anole", "anole-hf", "--out", "made"]
    assert main([*call, "--vq", "vqgan.ckpt"]) == 0
    parts = {"style": PromptStyle("{}", guidance=3.0, size=64)}  # fewer codes
    result = ImagePipeline.from_pretrained("made", parts=parts)("a red cube", seed=3)
    bare = ImagePipeline.from_pretrained("anole-hf", parts=parts)
    with pytest.raises(ValueError, match="visspec convert anole MODEL --vq vqgan"):
        bare("a red cube", seed=3)
    assert torch.equal(bare("a red cube", seed=3, output_type="latent").tokens[0], result.tokens[0])
    codec = load_taming_vq(conversion.safetensors_of(tmp_path / "vqgan.ckpt", tmp_path / "x"))
    pixels = codec.decode(result.tokens[0][None], (4, 4))[0]
    assert np.array_equal(np.asarray(result.images[0]), (255 * (pixels / 2 + 0.5)).round().byte().numpy())
    ImagePipeline.from_pretrained("made").save_pretrained("again")
    ImagePipeline.from_pretrained("again").save_pretrained("again")
    assert ImagePipeline.from_pretrained("again", parts=parts)("a red cube", seed=3).images == result.images
    for arguments, words in (
        ([], "vq: got none, expected the published codec of Anole"),
        (["--vq", "gone.ckpt"], "gone.ckpt does not exist"),
        (["--vq", "other.ckpt"], "vq: got a codec with 16 codes, expected 24"),
    ):
        assert words in refused(capsys, *call[:3], *arguments, "--out", "new")


def test_missing_argument_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights, _, vq, *rest = texts(tmp_path)
    t5(tmp_path / "small", 6)
    size = rest[:4]
    torch.save(filled(llamagen_vq_names()), "other.pt")
    for arguments, words in (
        ([weights], "vq: got none, expected the published codec of llamagen (t2i_*.pt"),
        ([weights, "--vq", "gone.pt"], "vq: gone.pt does not exist"),
        (["gone.pt", "--vq", vq], "weights: gone.pt does not exist"),
        ([weights, "--vq", vq, "--heads", "4"], "size: got None, expected the side of the model's images in pixels"),
        ([weights, "--vq", vq, "--size", "8"], "expected heads="),
        ([weights, "--vq", vq, *size], "text: got none, expected the text encoder that llamagen was trained with"),
        ([weights, "--vq", vq, *size, "--text", "small"], "text: small has 6 features, expected 12"),
        ([weights, "--vq", vq, *size, "--text", "vq_ds16_t2i.pt"], "text: vq_ds16_t2i.pt could not be loaded"),
        ([weights, "--vq", vq, *rest, "--drafter", "t5"], "drafter: t5 is not a drafter of image codes"),
        ([vq, "--vq", vq, *size], "has no tensor"),
        ([weights, "--vq", "other.pt", *rest], "vq: got a codec with 16 codes, expected 24"),
    ):
        assert words in refused(capsys, "convert", "llamagen", *arguments, "--out", "made")
        assert not (tmp_path / "made").exists() and not list(tmp_path.glob(".convert-*"))
    argv = ["convert", "var", *var(tmp_path), "--heads", "4", "--out", "made"]
    assert "heads: The weights of var determine it" in refused(capsys, *argv)
    argv = ["convert", "llamagen", weights, "--vq", vq, *rest, "--out", "t5"]
    assert "out: t5 already exists" in refused(capsys, *argv)
