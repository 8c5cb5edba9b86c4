"""Image networks in their authors' layouts with random numbers, against `layouts.py` or another stock class."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.doubles import raises_line
from tests.layouts import (
    DECODED,
    ENCODED,
    Formulas,
    chameleon_vq_names,
    filled,
    gpt_names,
    gpt_reference,
    ldm_names,
    llamagen_vq_names,
    turn_by_hand,
    within,
)
from visspec.models import published_tensors as layouts
from visspec.models.codecs import vq_layout as layouts_vq
from visspec.models.llamagen import layout as layouts_llamagen
from visspec.models.llamagen import network as llamagen

TOL = {"rtol": 1e-4, "atol": 2e-5}


# --- LlamaGen: the transformer ------------------------------------------------------------------------------------


def small(condition="class", grid=4, kv_heads=2, **fields):
    more = {"prefix": 3, "caption_width": 12} if condition == "caption" else {"classes": 10}
    more |= {"codes": 24, "kv_heads": kv_heads, "intermediate": 48} | fields
    return llamagen.LlamaGenConfig(2, 4, 32, grid, condition=condition, **more)


@pytest.fixture(params=["class", "caption"])
def model(request):
    model = llamagen.LlamaGen(small(request.param)).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.3)
    return model


def conditions(model, rows=2):
    if model.config.condition == "class":
        return torch.arange(rows) + 3
    return torch.randn(rows, model.config.prefix, model.config.caption_width)


def plain(model, condition, tokens):
    x = torch.cat([model.prefix(condition), model.embed(tokens)], dim=1)
    return model.head(model(inputs_embeds=x).last_hidden_state)


def test_prefixes_and_their_refusals(model):
    condition = conditions(model)
    once, both = model.prefix(condition), model.prefix(condition, guidance=True)
    assert torch.equal(both[:2], once) and both.shape[0] == 4 and torch.equal(both[2], both[3])
    if model.config.condition == "class":
        assert torch.equal(both[2, 0], model.cls_embedding.embedding_table.weight[10])
    else:
        inner = model.cls_embedding.cap_proj(model.cls_embedding.uncond_embedding)
        torch.testing.assert_close(both[2], inner)


def test_captions_move_to_the_left():
    features, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    moved, real = llamagen.left_padded(features, mask)
    assert real.tolist() == [[False, True, True, True], [False, False, False, True]]
    assert torch.equal(moved[0, 1:], features[0, :3]) and torch.equal(moved[1, 3], features[1, 0])
    assert not moved[~real].any()


def test_published_sizes():
    millions = {"B": 111, "L": 343, "XL": 775, "XXL": 1411, "3B": 3096}
    for size, expected in millions.items():
        with torch.device("meta"):
            model = llamagen.LlamaGen(llamagen.LlamaGenConfig(*llamagen.SIZES[size], 16))
        assert abs(sum(p.numel() for p in model.parameters()) / 1e6 - expected) < 0.01 * expected, size
    caption = llamagen.LlamaGenConfig(*llamagen.SIZES["XL"], 32, condition="caption")
    assert (caption.caption_width, caption.head_size) == (2048, 64)


@pytest.mark.parametrize("change", [{"heads": 3}, {"condition": "text"}])
def test_wrong_settings_are_refused(change):
    with pytest.raises(ValueError, match=r"got .*, expected"):
        llamagen.LlamaGenConfig(**({"layers": 1, "heads": 4, "hidden_size": 32, "grid": 4} | change))


LLAMAGEN = {"middle": ("mid.0", "mid.1", "mid.2"), "levels": ("conv_blocks.0", "conv_blocks.1"), "res": "res"}
FORMS = {
    "llamagen": (
        llamagen_vq_names, layouts_vq.load_llamagen_vq, within("encoder", LLAMAGEN), within("decoder", LLAMAGEN), True,
    ),
    "chameleon": (chameleon_vq_names, layouts_vq.load_taming_vq, ENCODED, DECODED, False),
}  # fmt: skip


def looked_up(tensors, tokens, grid, normalised):
    book = tensors["quantize.embedding.weight"]
    book = book / book.norm(dim=-1, keepdim=True) if normalised else book
    return book[tokens].unflatten(1, grid).permute(0, 3, 1, 2), book


def reference_decode(tensors, tokens, grid, form, normalised):
    formulas = Formulas(tensors)
    code, _ = looked_up(tensors, tokens, grid, normalised)
    return formulas.decode(formulas.conv(code, "post_quant_conv"), **form).permute(0, 2, 3, 1)


# --- each layout, loaded -------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_codecs_as_published(tmp_path, form):
    names, load, encoder, decoder, normalised = FORMS[form]
    tensors = filled(names())
    tensors["decoder.conv_out.weight"] *= 0.1  # most pixels inside [-1, 1]
    file = tmp_path / "vq.safetensors"
    save_file(tensors, file)
    codec = load(file)
    assert codec.factor == 2
    tokens, grid = torch.randint(16, (2, 12)), (3, 4)  # not square
    result, expected = codec.decode(tokens, grid), reference_decode(tensors, tokens, grid, decoder, normalised)
    assert result.shape == (2, 6, 8, 3) and result.abs().max() <= 1 and (expected.abs() < 1).any()
    torch.testing.assert_close(result, expected.clamp(-1, 1), **TOL)

    pixels = torch.rand(2, 6, 8, 3) * 2 - 1
    latent = Formulas(tensors).encode(pixels.permute(0, 3, 1, 2), **encoder)
    latent = latent.permute(0, 2, 3, 1).flatten(1, 2)
    latent = F.normalize(latent, dim=-1) if normalised else latent
    _, book = looked_up(tensors, tokens, grid, normalised)
    assert torch.equal(codec.encode(pixels), (latent[:, :, None] - book).norm(dim=-1).argmin(-1))
    torch.testing.assert_close(codec.codebook, book)

    codec.model.save_pretrained(tmp_path / "stock")  # round trip as the stock class it is
    again = layouts_vq.ImageCodec(layouts_vq.VQModel.from_pretrained(tmp_path / "stock").eval())
    assert torch.equal(again.decode(tokens, grid), result)
    with pytest.raises(ValueError, match=r"tokens: got .*, expected"):
        codec.decode(tokens - 17, grid)


@pytest.mark.parametrize("name", ["llamagen-vq16", "chameleon"])
def test_published_codec_widths(name):
    codes, size, attended = (16384, 8, (4,)) if "llama" in name else (8192, 256, ())
    names = ldm_names(128, (1, 1, 2, 2, 4), 2, 256, attended=attended, both=True)
    with torch.device("meta"):
        settings = layouts_vq.stock_settings(
            layouts.Weights(name, {name: (name, torch.empty(shape)) for name, shape in names.items()})
        )
        model = layouts_vq.VQModel(**settings, num_vq_embeddings=codes, vq_embed_dim=size)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes["quantize.embedding.weight"] == ((16384, 8) if "llama" in name else (8192, 256))
    assert shapes["decoder.conv_in.weight"] == (512, 256, 3, 3) and layouts_vq.ImageCodec(model).factor == 16
    assert [model.encoder.down_blocks[i].resnets[1].conv2.out_channels for i in range(5)] == [128, 128, 256, 256, 512]
    assert all(len(block.resnets) == 3 for block in model.decoder.up_blocks)
    assert any("attentions" in key and "up_blocks.0" in key for key in shapes) == ("llama" in name)


@torch.no_grad()
@pytest.mark.parametrize("caption", [False, True])
def test_llamagen_loads_as_published(tmp_path, caption):
    tensors = filled(gpt_names(caption), 0.3)
    file = tmp_path / "c2i.safetensors"
    save_file(tensors | {"freqs_cis": torch.zeros(17, 4, 2)}, file)
    model = layouts_llamagen.load_llamagen(file, grid=4, heads=4)
    assert model.config == small("caption" if caption else "class") and not model.training
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())
    condition, tokens = conditions(model), torch.randint(24, (2, 16))
    if caption:
        inner = F.gelu(condition @ tensors["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh")
        first = inner @ tensors["cls_embedding.cap_proj.fc2.weight"].T
    else:
        first = tensors["cls_embedding.embedding_table.weight"][condition][:, None]
    x = torch.cat([first, tensors["tok_embeddings.weight"][tokens]], dim=1)
    expected = gpt_reference(tensors, x, turn_by_hand(first.shape[1], 4, 8), 4, 2)
    torch.testing.assert_close(plain(model, condition, tokens), expected, **TOL)

    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file)
    half = layouts_llamagen.load_llamagen(file, 4, 4)
    assert half.dtype == torch.bfloat16 and half(half.embed(tokens))[0].dtype == torch.bfloat16
    assert half._turns.dtype == torch.complex64


# --- refusals --------------------------------------------------------------------------------------------------------


LOADERS = {
    "llamagen": (lambda: gpt_names(False), lambda file: layouts_llamagen.load_llamagen(file, 4, 4)),
    "llamagen_vq": (llamagen_vq_names, layouts_vq.load_llamagen_vq),
    "taming_vq": (chameleon_vq_names, layouts_vq.load_taming_vq),
}


@pytest.mark.parametrize("layout", LOADERS)
def test_misfit_named_as_published(tmp_path, layout):
    names, load = LOADERS[layout]
    file, tensors = tmp_path / "model.safetensors", filled(names())
    name = next(name for name in sorted(tensors) if not re.search("codebook_used|^loss", name))
    for changed, words in (
        ({k: v for k, v in tensors.items() if k != name}, r"checkpoint: .* (lacks|has no tensor) "),
        (tensors | {name: torch.zeros(*tensors[name].shape, 2)}, rf"{re.escape(name)}.*expected"),
        (tensors | {"head.weight": torch.zeros(1)}, r"unknown tensor 'head\.weight'"),
        ({"a": torch.zeros(1)}, r"has no tensor .*\(but a, ...\)"),
    ):
        save_file(changed, file)
        with raises_line(words):
            load(file)


def test_llamagen_does_not_guess(tmp_path):
    file = tmp_path / "gpt.safetensors"
    save_file(filled(gpt_names(False)), file)
    with pytest.raises(ValueError, match=r"grid: .* does not contain"):
        layouts_llamagen.load_llamagen(file)
    with pytest.raises(ValueError, match=r"heads: .* has 2 layers of width 32"):
        layouts_llamagen.load_llamagen(file, 4)
    with pytest.raises(ValueError, match="heads: got 3 for a wqkv of 64 x 32"):
        layouts_llamagen.load_llamagen(file, 4, 3)


def test_nothing_outside_the_folder_is_read(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "secret.safetensors"
    inside.mkdir()
    save_file(filled(gpt_names(False)), outside)
    (inside / "model.safetensors").symlink_to(outside)
    for path in (inside, inside / "model.safetensors"):
        with pytest.raises(ValueError, match="expected a file inside the folder"):
            layouts.read_all_tensors(path)
    (inside / "model.safetensors").unlink()
    index = {"weight_map": {"tok_embeddings.weight": "../secret.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="expected a file inside the folder"):
        layouts.read_all_tensors(inside)


def test_other_paths_that_hold_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"does not exist, expected a \.safetensors file"):
        layouts.read_all_tensors(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="no weights"):
        layouts.read_all_tensors(tmp_path)
    (tmp_path / "a.pt").write_bytes(b"")
    for path in (tmp_path, tmp_path / "a.pt"):
        with raises_line(r"pickled weights \(a\.pt\), expected \.safetensors .*visspec convert"):
            layouts.read_all_tensors(path)
    (tmp_path / "a.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        layouts.read_all_tensors(tmp_path / "a.safetensors")
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="holds tensor 'w' twice"):
        layouts.read_all_tensors(tmp_path)
    with pytest.raises(ValueError, match="have the same name in our layout"):
        layouts.rename({"a.w": torch.zeros(1), "b.w": torch.zeros(1)}, [(r"^[ab]\.", "c.")])
