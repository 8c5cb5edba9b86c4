"""Image networks that transformers lacks, and checkpoints in their authors' key layouts.

Every layout is written out below by its published names and shapes, filled with random numbers and loaded. What the
loaded model says is compared with formulas that read the published tensors directly, or with another stock class.
"""

import argparse
import json
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from tests.doubles import one_sentence
from visspec import tree as trees
from visspec.cache import visibility
from visspec.io import convert_checkpoint
from visspec.models import published_tensors as layouts
from visspec.models.attention.slot_layers import SlotLayers
from visspec.models.codecs import vq_layout as layouts_vq
from visspec.models.codecs import vqgan
from visspec.models.llamagen import layout as layouts_llamagen
from visspec.models.llamagen import network as llamagen

TOL = {"rtol": 1e-4, "atol": 2e-5}


# --- LlamaGen: the transformer ------------------------------------------------------------------------------------


def small(condition="class", grid=4, kv_heads=2, **fields):
    more = {"prefix": 3, "caption_width": 12} if condition == "caption" else {"classes": 10}
    return llamagen.LlamaGenConfig(
        2, 4, 32, grid, condition=condition, codes=24, kv_heads=kv_heads, intermediate=48, **(more | fields)
    )


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


@torch.no_grad()
def test_a_cache_changes_nothing(model):
    condition, tokens = conditions(model), torch.randint(24, (2, 9))
    expected, first = plain(model, condition, tokens), model.config.prefix
    cache = DynamicCache()
    hidden = [model(model.prefix(condition), None, None, cache).last_hidden_state]
    for start, end in ((0, 1), (1, 5), (5, 9)):  # one code, then several under the default mask
        place = torch.arange(first + start, first + end)[None]
        hidden.append(model(model.embed(tokens[:, start:end]), place, None, cache).last_hidden_state)
    torch.testing.assert_close(model.head(torch.cat(hidden, dim=1)), expected, **TOL)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["additive", "bool"])
def test_a_tree_equals_each_path_alone_also_after_commit(model, kind):
    """Seven draft nodes of two rows with unlike lengths, in the same slot cache and mask as stock decoders."""
    parent = [-1, 0, 0, 1, 1, 2, 5]
    tree = trees.static(tuple(parent))
    condition, first = conditions(model), model.config.prefix
    before, draft = torch.randint(24, (2, 4)), torch.randint(24, (2, 7))
    cache = SlotLayers(2)
    cache.slots.open(first + 4, "cpu")
    model(torch.cat([model.prefix(condition), model.embed(before)], dim=1), None, None, cache)
    cache.slots.commit([list(range(first + 4)), list(range(first + 2))])  # the second row keeps two codes

    def verify(tokens):
        extent = cache.slots.open(7, "cpu")
        seen = visibility(tree.ancestor, cache.slots.lengths, None, extent)[:, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        place = torch.tensor(cache.slots.lengths)[:, None] + tree.depth
        return model.head(model(model.embed(tokens), place, mask if kind == "additive" else seen, cache)[0])

    paths = {n: [n] for n in range(7)}
    for n in range(1, 7):
        paths[n] = [*paths[parent[n]], n]
    kept = [before[0], before[1, :2]]
    for _ in range(2):
        logits = verify(draft)
        for row in range(2):
            for node, path in paths.items():
                alone = torch.cat([kept[row], draft[row, path]])[None]
                expected = plain(model, condition[row : row + 1], alone)[0, -1]
                torch.testing.assert_close(logits[row, node], expected, **TOL)
        cache.slots.commit([paths[6], paths[4]])
        kept = [torch.cat([kept[0], draft[0, paths[6]]]), torch.cat([kept[1], draft[1, paths[4]]])]
        draft = torch.randint(24, (2, 7))


def test_rotations_depend_on_differences_of_coordinates_only():
    grid, size, prefix = 5, 16, 2
    table = llamagen.turns(prefix, grid, size, 10000.0)
    assert table.shape == (prefix + 2 * grid * grid, size // 2)
    query, key = torch.randn(2, size)

    def logit(at, other):
        turn = table[[prefix + at[0] * grid + at[1], prefix + other[0] * grid + other[1]]]
        a, b = llamagen.rotate(torch.stack([query, key])[None, :, None], turn[None])[0, :, 0]
        return a @ b

    for shift in ((0, 1), (2, 0), (2, 3)):
        near = logit((2, 1), (1, 0))
        moved = logit((2 + shift[0], 1 + shift[1]), (1 + shift[0], shift[1]))
        torch.testing.assert_close(near, moved, **TOL)
    assert not torch.isclose(logit((1, 0), (0, 0)), logit((0, 1), (0, 0)))  # rows and columns are told apart
    # row-major: the code below is one grid width away, its row turned by one and its column by none
    below = (table[prefix + grid] / table[prefix]).angle()
    torch.testing.assert_close(below[4:], torch.zeros(4))
    torch.testing.assert_close(below[:4], 10000.0 ** (-torch.arange(4) / 4))
    assert not table[:prefix].any(), "queries and keys of the prefix are zero, as published"


def test_prefixes_and_their_refusals(model):
    condition = conditions(model)
    once, both = model.prefix(condition), model.prefix(condition, guidance=True)
    assert torch.equal(both[:2], once) and both.shape[0] == 4 and torch.equal(both[2], both[3])
    if model.config.condition == "class":
        assert torch.equal(both[2, 0], model.cls_embedding.embedding_table.weight[10])
        wrong = torch.tensor([11])
    else:
        inner = model.cls_embedding.cap_proj(model.cls_embedding.uncond_embedding)
        torch.testing.assert_close(both[2], inner)
        wrong = torch.zeros(1, 4, 12)
    with pytest.raises(ValueError, match=r"condition: got .*, expected"):
        model.prefix(wrong)


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
            model = llamagen.LlamaGen(llamagen.LlamaGenConfig.of(size, 16))
        assert abs(sum(p.numel() for p in model.parameters()) / 1e6 - expected) < 0.01 * expected, size
    caption = llamagen.LlamaGenConfig.of("XL", 32, condition="caption")
    assert (caption.prefix, caption.caption_width, caption.head_size) == (120, 2048, 64)
    with pytest.raises(ValueError, match="size: got 'XS', expected one of B, L"):
        llamagen.LlamaGenConfig.of("XS", 16)


@pytest.mark.parametrize("change", [{"heads": 3}, {"condition": "text"}, {"prefix": 2}])
def test_wrong_settings_are_refused(change):
    with pytest.raises(ValueError, match=r"got .*, expected"):
        llamagen.LlamaGenConfig(**({"layers": 1, "heads": 4, "hidden_size": 32, "grid": 4} | change))


# --- published names and shapes -----------------------------------------------------------------------------------


def affine(name, *shape):
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def conv(name, out, inn, *kernel):
    return affine(name, out, inn, *kernel)


def filled(names, scale=0.2):
    """Random values; scales around one, so that norms do not vanish."""
    return {
        name: torch.randn(shape) * scale + (1.0 if re.search(r"norm[^.]*\.weight$", name) else 0.0)
        for name, shape in names.items()
    }


def gpt_names(caption):
    """A LlamaGen checkpoint: 2 layers, 4 heads of 8, 2 key-value heads, 24 codes."""
    names = {"tok_embeddings.weight": (24, 32), "norm.weight": (32,), "output.weight": (24, 32)}
    if caption:
        names["cls_embedding.cap_proj.fc1.weight"] = (32, 12)
        names["cls_embedding.cap_proj.fc2.weight"] = (32, 32)
        names["cls_embedding.uncond_embedding"] = (3, 12)
    else:
        names["cls_embedding.embedding_table.weight"] = (11, 32)
    for layer in ("layers.0", "layers.1"):
        names[f"{layer}.attention.wqkv.weight"], names[f"{layer}.attention.wo.weight"] = (64, 32), (32, 32)
        names[f"{layer}.feed_forward.w1.weight"] = names[f"{layer}.feed_forward.w3.weight"] = (48, 32)
        names[f"{layer}.feed_forward.w2.weight"] = (32, 48)
        names[f"{layer}.attention_norm.weight"] = names[f"{layer}.ffn_norm.weight"] = (32,)
    return names


def resnet(name, inn, out):
    names = affine(f"{name}.norm1", inn) | conv(f"{name}.conv1", out, inn, 3, 3)
    names |= affine(f"{name}.norm2", out) | conv(f"{name}.conv2", out, out, 3, 3)
    return names | (conv(f"{name}.nin_shortcut", out, inn, 1, 1) if inn != out else {})


def attention(name, c):
    names = affine(f"{name}.norm", c)
    for part in ("q", "k", "v", "proj_out"):
        names |= conv(f"{name}.{part}", c, c, 1, 1)
    return names


def ends(latent, fine, coarse, codes, size):
    names = conv("encoder.conv_in", fine, 3, 3, 3) | affine("encoder.norm_out", coarse)
    names |= conv("encoder.conv_out", latent, coarse, 3, 3) | conv("decoder.conv_in", coarse, latent, 3, 3)
    names |= affine("decoder.norm_out", fine) | conv("decoder.conv_out", 3, fine, 3, 3)
    names |= conv("quant_conv", size, latent, 1, 1) | conv("post_quant_conv", latent, size, 1, 1)
    return names | {"quantize.embedding.weight": (codes, size)}


def llamagen_vq_names():
    """Two levels of 32 and 64 channels, one block each (two in the decoder), 16 codes of size 4, latent 8."""
    names = ends(8, 32, 64, 16, 4) | {"quantize.codebook_used": (64,)}
    for part in ("encoder", "decoder"):
        names |= resnet(f"{part}.mid.0", 64, 64) | attention(f"{part}.mid.1", 64) | resnet(f"{part}.mid.2", 64, 64)
    names |= resnet("encoder.conv_blocks.0.res.0", 32, 32)
    names |= conv("encoder.conv_blocks.0.downsample.conv", 32, 32, 3, 3)
    names |= resnet("encoder.conv_blocks.1.res.0", 32, 64) | attention("encoder.conv_blocks.1.attn.0", 64)
    names |= resnet("decoder.conv_blocks.0.res.0", 64, 64) | attention("decoder.conv_blocks.0.attn.0", 64)
    names |= resnet("decoder.conv_blocks.0.res.1", 64, 64) | attention("decoder.conv_blocks.0.attn.1", 64)
    names |= conv("decoder.conv_blocks.0.upsample.conv", 64, 64, 3, 3)
    return names | resnet("decoder.conv_blocks.1.res.0", 64, 32) | resnet("decoder.conv_blocks.1.res.1", 32, 32)


def chameleon_vq_names():
    """The same sizes; levels are counted from the finest on both sides, and only the middle has attention."""
    names = ends(8, 32, 64, 16, 4) | {"loss.discriminator.main.0.weight": (4, 3, 4, 4)}
    for part in ("encoder", "decoder"):
        names |= resnet(f"{part}.mid.block_1", 64, 64) | attention(f"{part}.mid.attn_1", 64)
        names |= resnet(f"{part}.mid.block_2", 64, 64)
    names |= resnet("encoder.down.0.block.0", 32, 32) | conv("encoder.down.0.downsample.conv", 32, 32, 3, 3)
    names |= resnet("encoder.down.1.block.0", 32, 64)
    names |= resnet("decoder.up.1.block.0", 64, 64) | resnet("decoder.up.1.block.1", 64, 64)
    names |= conv("decoder.up.1.upsample.conv", 64, 64, 3, 3)
    return names | resnet("decoder.up.0.block.0", 64, 32) | resnet("decoder.up.0.block.1", 32, 32)


# --- formulas that read published tensors ---------------------------------------------------------------------------


class Formulas:
    """Convolutional codecs as their papers define them, on a dict of published tensors."""

    def __init__(self, tensors):
        self.t = tensors

    def conv(self, x, name, **how):
        return F.conv2d(x, self.t[f"{name}.weight"], self.t[f"{name}.bias"], **how)

    def norm(self, x, name):
        return F.group_norm(x, 32, self.t[f"{name}.weight"], self.t[f"{name}.bias"], 1e-6)

    def resnet(self, x, name):
        h = self.conv(F.silu(self.norm(x, f"{name}.norm1")), f"{name}.conv1", padding=1)
        h = self.conv(F.silu(self.norm(h, f"{name}.norm2")), f"{name}.conv2", padding=1)
        return h + (self.conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in self.t else x)

    def attention(self, x, name):
        if f"{name}.q.weight" not in self.t:
            return x
        h = self.norm(x, f"{name}.norm")
        q, k, v = (self.conv(h, f"{name}.{part}").flatten(2) for part in "qkv")
        weight = (q.transpose(1, 2) @ k * q.shape[1] ** -0.5).softmax(-1)
        return x + self.conv((v @ weight.transpose(1, 2)).unflatten(2, x.shape[-2:]), f"{name}.proj_out")

    def middle(self, x, names):
        return self.resnet(self.attention(self.resnet(x, names[0]), names[1]), names[2])

    def level(self, x, name, blocks, res):
        for i in range(blocks):
            x = self.attention(self.resnet(x, f"{name}.{res}.{i}"), f"{name}.attn.{i}")
        return x

    def decode(self, latent, middle, levels, res):
        x = self.middle(self.conv(latent, "decoder.conv_in", padding=1), middle)
        for name in levels:
            x = self.level(x, f"decoder.{name}", 2, res)
            if f"decoder.{name}.upsample.conv.weight" in self.t:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
                x = self.conv(x, f"decoder.{name}.upsample.conv", padding=1)
        return self.conv(F.silu(self.norm(x, "decoder.norm_out")), "decoder.conv_out", padding=1)

    def encode(self, pixels, middle, levels, res):
        x = self.conv(pixels, "encoder.conv_in", padding=1)
        for name in levels:
            x = self.level(x, f"encoder.{name}", 1, res)
            if f"encoder.{name}.downsample.conv.weight" in self.t:
                x = self.conv(F.pad(x, (0, 1, 0, 1)), f"encoder.{name}.downsample.conv", stride=2)
        x = self.conv(F.silu(self.norm(self.middle(x, middle), "encoder.norm_out")), "encoder.conv_out", padding=1)
        return self.conv(x, "quant_conv")


LLAMAGEN = {"middle": ("mid.0", "mid.1", "mid.2"), "levels": ("conv_blocks.0", "conv_blocks.1"), "res": "res"}
TAMING = {"middle": ("mid.block_1", "mid.attn_1", "mid.block_2"), "res": "block"}
FORMS = {
    "llamagen": (llamagen_vq_names, layouts_vq.load_llamagen_vq, LLAMAGEN, LLAMAGEN, True),
    "chameleon": (
        chameleon_vq_names,
        layouts_vq.load_taming_vq,
        TAMING | {"levels": ("down.0", "down.1")},
        TAMING | {"levels": ("up.1", "up.0")},
        False,
    ),
}


def looked_up(tensors, tokens, grid, normalised):
    book = tensors["quantize.embedding.weight"]
    book = book / book.norm(dim=-1, keepdim=True) if normalised else book
    return book[tokens].unflatten(1, grid).permute(0, 3, 1, 2), book


def within(part, form):
    return form | {"middle": tuple(f"{part}.{name}" for name in form["middle"])}


def reference_decode(tensors, tokens, grid, form, normalised):
    formulas = Formulas(tensors)
    code, _ = looked_up(tensors, tokens, grid, normalised)
    return formulas.decode(formulas.conv(code, "post_quant_conv"), **within("decoder", form)).permute(0, 2, 3, 1)


# --- each layout, loaded -------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_codecs_decode_and_encode_as_published(tmp_path, form):
    names, load, encoder, decoder, normalised = FORMS[form]
    tensors = filled(names())
    tensors["decoder.conv_out.weight"] *= 0.1  # most pixels inside [-1, 1]
    file = tmp_path / "vq.safetensors"
    save_file(tensors, file)
    codec = load(file)
    assert codec.factor == 2
    tokens, grid = torch.randint(16, (2, 12)), (3, 4)  # not square
    found, expected = codec.decode(tokens, grid), reference_decode(tensors, tokens, grid, decoder, normalised)
    assert found.shape == (2, 6, 8, 3) and found.abs().max() <= 1 and (expected.abs() < 1).any()
    torch.testing.assert_close(found, expected.clamp(-1, 1), **TOL)

    pixels = torch.rand(2, 6, 8, 3) * 2 - 1
    latent = Formulas(tensors).encode(pixels.permute(0, 3, 1, 2), **within("encoder", encoder))
    latent = latent.permute(0, 2, 3, 1).flatten(1, 2)
    latent = F.normalize(latent, dim=-1) if normalised else latent
    _, book = looked_up(tensors, tokens, grid, normalised)
    assert torch.equal(codec.encode(pixels), (latent[:, :, None] - book).norm(dim=-1).argmin(-1))
    torch.testing.assert_close(codec.codebook, book)

    codec.model.save_pretrained(tmp_path / "stock")  # round trip as the stock class it is
    again = vqgan.ImageCodec(vqgan.VQModel.from_pretrained(tmp_path / "stock").eval())
    assert torch.equal(again.decode(tokens, grid), found)
    with pytest.raises(ValueError, match=r"tokens: got .*, expected"):
        codec.decode(tokens - 17, grid)
    with pytest.raises(ValueError, match="pixels: got shape"):
        codec.encode(pixels[:, :5])


@pytest.mark.parametrize("name, names", [("llamagen-vq16", llamagen_vq_names), ("chameleon", chameleon_vq_names)])
def test_published_codecs_have_published_widths(name, names):
    with torch.device("meta"):
        shapes = {"llamagen-vq16": vqgan.VQShape(16384, 8, attention=True), "chameleon": vqgan.VQShape(8192, 256)}
        model = shapes[name].build()
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes["quantize.embedding.weight"] == ((16384, 8) if "llama" in name else (8192, 256))
    assert shapes["decoder.conv_in.weight"] == (512, 256, 3, 3) and vqgan.ImageCodec(model).factor == 16
    assert [model.encoder.down_blocks[i].resnets[1].conv2.out_channels for i in range(5)] == [128, 128, 256, 256, 512]
    assert all(len(block.resnets) == 3 for block in model.decoder.up_blocks)
    assert any("attentions" in key and "up_blocks.0" in key for key in shapes) == ("llama" in name)


def gpt_reference(tensors, x, turn, heads, kv_heads):
    """LlamaGen's decoder on embeddings (B, N, d), from its published tensors; turn is (N, C, 2): cosine and sine."""

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * tensors[f"{name}.weight"]

    def rotated(x):  # (B, N, H, E)
        even, odd = x[..., 0::2], x[..., 1::2]
        cosine, sine = turn[None, :, None, :, 0], turn[None, :, None, :, 1]
        return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1).flatten(-2)

    size = x.shape[-1] // heads
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for i in range(2):
        qkv = norm(x, f"layers.{i}.attention_norm") @ tensors[f"layers.{i}.attention.wqkv.weight"].T
        q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, size)) for y in (q, k, v))
        q, k = rotated(q), rotated(k)
        k, v = (y.repeat_interleave(heads // kv_heads, dim=2) for y in (k, v))
        score = torch.einsum("bqhe,bkhe->bhqk", q, k) / size**0.5
        weight = score.masked_fill(~causal, -torch.inf).softmax(-1)
        x = x + torch.einsum("bhqk,bkhe->bqhe", weight, v).flatten(2) @ tensors[f"layers.{i}.attention.wo.weight"].T
        h = norm(x, f"layers.{i}.ffn_norm")
        w1, w2, w3 = (tensors[f"layers.{i}.feed_forward.w{n}.weight"] for n in (1, 2, 3))
        x = x + (F.silu(h @ w1.T) * (h @ w3.T)) @ w2.T
    return norm(x, "norm") @ tensors["output.weight"].T


def turn_by_hand(prefix, grid, size):
    """Cosines and sines of rows and columns; zeros for the prefix, where the authors rotate by nothing at all."""
    count = size // 4
    rows = [torch.zeros(2 * count, 2)] * prefix
    for row in range(grid):
        for column in range(grid):
            angle = torch.tensor([at * 10000.0 ** (-i / count) for at in (row, column) for i in range(count)])
            rows.append(torch.stack([angle.cos(), angle.sin()], dim=-1))
    return torch.stack(rows)


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
def test_what_does_not_fit_is_refused_by_its_published_name(tmp_path, layout):
    names, load = LOADERS[layout]
    file, tensors = tmp_path / "model.safetensors", filled(names())
    name = next(name for name in sorted(tensors) if not re.search("codebook_used|^loss", name))
    for changed, words in (
        ({k: v for k, v in tensors.items() if k != name}, r"checkpoint: .* (lacks|has no tensor) .*expected"),
        (tensors | {name: torch.zeros(*tensors[name].shape, 2)}, rf"{re.escape(name)}.*expected"),
        (tensors | {"head.weight": torch.zeros(1)}, r"unknown tensor 'head\.weight'"),
        ({"a": torch.zeros(1)}, r"has no tensor .*\(but a, ...\), expected another layout"),
    ):
        save_file(changed, file)
        with one_sentence(words):
            load(file)


def test_llamagen_does_not_guess(tmp_path):
    file = tmp_path / "gpt.safetensors"
    save_file(filled(gpt_names(False)), file)
    with pytest.raises(ValueError, match=r"grid: .* does not tell"):
        layouts_llamagen.load_llamagen(file)
    with pytest.raises(ValueError, match=r"heads: .* has 2 layers of width 32"):
        layouts_llamagen.load_llamagen(file, 4)
    with pytest.raises(ValueError, match="heads: got 3 for a wqkv of 64 x 32"):
        layouts_llamagen.load_llamagen(file, 4, 3)


def test_pickles_are_converted_only_when_asked(tmp_path):
    tensors = filled(gpt_names(False))
    pickled, out = tmp_path / "c2i_B_256.pt", tmp_path / "out" / "c2i.safetensors"
    out.parent.mkdir()
    torch.save({"model": tensors, "optimizer": {"state": {}}, "steps": 3, "args": argparse.Namespace(lr=1.0)}, pickled)
    for path in (pickled, tmp_path):
        with one_sentence(r"pickled weights \(c2i_B_256\.pt\), expected \.safetensors .*visspec convert"):
            layouts_llamagen.load_llamagen(path, 4, 4)
    convert_checkpoint.convert(pickled, out)
    assert load_file(out).keys() == tensors.keys()
    assert layouts_llamagen.load_llamagen(out.parent, 4, 4).config == small()


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
    (tmp_path / "a.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        layouts.read_all_tensors(tmp_path / "a.safetensors")
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="holds tensor 'w' twice"):
        layouts.read_all_tensors(tmp_path)
    with pytest.raises(ValueError, match="are the same, expected one layout"):
        layouts.rename({"a.w": torch.zeros(1), "b.w": torch.zeros(1)}, [(r"^[ab]\.", "c.")])
