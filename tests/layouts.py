"""Checkpoints of image networks in their authors' key layouts, with random numbers, and formulas that read them."""

import json
import math
import re

import torch
import torch.nn.functional as F
from safetensors.torch import save_file


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


def ldm_names(channels, multipliers, blocks, latent, out=None, attended=(), attend=attention, both=False):
    """An encoder and a decoder in LDM's layout. out: channels of the encoder's output, as many as latent by default.

    attend: names of an attention, None for a network without any. attended: levels of the encoder (both: and of the
    decoder) that have one, beside the middle.
    """
    widths = [channels * m for m in multipliers]
    last, top = widths[-1], len(widths) - 1
    names = conv("encoder.conv_in", channels, 3, 3, 3) | conv("decoder.conv_in", last, latent, 3, 3)
    names |= affine("encoder.norm_out", last) | conv("encoder.conv_out", out or latent, last, 3, 3)
    names |= affine("decoder.norm_out", channels) | conv("decoder.conv_out", 3, channels, 3, 3)
    for part in ("encoder", "decoder"):
        names |= resnet(f"{part}.mid.block_1", last, last) | (attend(f"{part}.mid.attn_1", last) if attend else {})
        names |= resnet(f"{part}.mid.block_2", last, last)
    for level, width in enumerate(widths):
        down, up = f"encoder.down.{level}", f"decoder.up.{level}"
        for i in range(blocks):
            names |= resnet(f"{down}.block.{i}", width if i else widths[max(level - 1, 0)], width)
            names |= attend(f"{down}.attn.{i}", width) if level in attended else {}
        for i in range(blocks + 1):
            names |= resnet(f"{up}.block.{i}", width if i else widths[min(level + 1, top)], width)
            names |= attend(f"{up}.attn.{i}", width) if both and level in attended else {}
        names |= conv(f"{down}.downsample.conv", width, width, 3, 3) if level < top else {}
        names |= conv(f"{up}.upsample.conv", width, width, 3, 3) if level else {}
    return names


def chameleon_vq_names():
    """Two levels of 32 and 64 channels with attention in the middle alone, 16 codes of size 4, latent 8."""
    names = ldm_names(32, (1, 2), 1, 8) | conv("quant_conv", 4, 8, 1, 1) | conv("post_quant_conv", 8, 4, 1, 1)
    return names | {"quantize.embedding.weight": (16, 4), "loss.discriminator.main.0.weight": (4, 3, 4, 4)}


def kl_names(channels, multipliers, blocks, latent, attended, quantised=True):
    """A KL autoencoder in LDM's layout. attended: levels of the encoder with attention."""
    names = ldm_names(channels, multipliers, blocks, latent, 2 * latent, attended)
    if quantised:
        names |= conv("quant_conv", 2 * latent, 2 * latent, 1, 1) | conv("post_quant_conv", latent, latent, 1, 1)
    return names


class Tensors:
    """Formulas on a dict of published tensors."""

    def __init__(self, tensors):
        self.t = tensors

    def linear(self, x, name):
        return x @ self.t[f"{name}.weight"].T + self.t[f"{name}.bias"]


class Formulas(Tensors):
    """Convolutional codecs as their papers define them."""

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


def within(part, form):
    return form | {"middle": tuple(f"{part}.{name}" for name in form["middle"])}


TAMING = {"middle": ("mid.block_1", "mid.attn_1", "mid.block_2"), "res": "block"}
ENCODED = within("encoder", TAMING | {"levels": ("down.0", "down.1")})  # two levels in LDM's layout
DECODED = within("decoder", TAMING | {"levels": ("up.1", "up.0")})


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


def mar_names(config):
    """A published MAR checkpoint by names and shapes."""
    width, slots = config.width, config.buffer + config.tokens
    names = {
        "class_emb.weight": (config.classes, width),
        "fake_latent": (1, width),
        "mask_token": (1, 1, width),
        "encoder_pos_embed_learned": (1, slots, width),
        "decoder_pos_embed_learned": (1, slots, width),
        "diffusion_pos_embed_learned": (1, config.tokens, width),
    }
    names |= affine("z_proj", width, config.size) | affine("decoder_embed", width, width)
    for name in ("z_proj_ln", "encoder_norm", "decoder_norm"):
        names |= affine(name, width)
    for block in [f"{side}_blocks.{i}" for side in ("encoder", "decoder") for i in range(config.depth)]:
        names |= affine(f"{block}.norm1", width) | affine(f"{block}.norm2", width)
        names |= affine(f"{block}.attn.qkv", 3 * width, width) | affine(f"{block}.attn.proj", width, width)
        names |= affine(f"{block}.mlp.fc1", 4 * width, width) | affine(f"{block}.mlp.fc2", width, 4 * width)
    return names | head_names("diffloss.net", config.size, width, config.head_width, config.head_depth, 2)


def head_names(name, size, condition, width, depth, outputs):
    names = affine(f"{name}.time_embed.mlp.0", width, 256) | affine(f"{name}.time_embed.mlp.2", width, width)
    names |= affine(f"{name}.cond_embed", width, condition) | affine(f"{name}.input_proj", width, size)
    for block in [f"{name}.res_blocks.{i}" for i in range(depth)]:
        names |= affine(f"{block}.in_ln", width) | affine(f"{block}.adaLN_modulation.1", 3 * width, width)
        names |= affine(f"{block}.mlp.0", width, width) | affine(f"{block}.mlp.2", width, width)
    names |= affine(f"{name}.final_layer.linear", outputs * size, width)
    return names | affine(f"{name}.final_layer.adaLN_modulation.1", 2 * width, width)


TINY_KL = (32, (1, 2), 2, 4, (1,))


class KLFormulas(Formulas):
    """LDM's autoencoder; every level has as many blocks as it has tensors."""

    def level(self, x, name, blocks, res):
        while f"{name}.{res}.{blocks}.norm1.weight" in self.t:
            blocks += 1
        return super().level(x, name, blocks, res)


class ScaleFormulas(Tensors):
    """What VAR's and Infinity's transformers share."""

    def norm(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()

    def gelu(self, h):
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))

    def attended(self, x, name, heads, hidden, turned=lambda x: x):
        """Attention within x (L, C), with queries and keys of length 1 and a scale a head. turned: of (H, L, E)."""
        h = x @ self.t[f"{name}.mat_qkv.weight"].T
        h = h + torch.cat([self.t[f"{name}.{part}"] for part in ("q_bias", "zero_k_bias", "v_bias")])
        q, k, v = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in h.chunk(3, dim=1))
        sharp = self.t[f"{name}.scale_mul_1H11"][0].clamp(max=math.log(100)).exp()
        q, k = q / q.norm(dim=-1, keepdim=True) * sharp, k / k.norm(dim=-1, keepdim=True)
        weight = (turned(q) @ turned(k).transpose(1, 2) + hidden).softmax(-1)
        return self.linear((weight @ v).transpose(0, 1).flatten(1), f"{name}.proj")


def scale_tensors(names, scale):
    """Random tensors of VAR or Infinity: keys have no bias, one of two heads is beyond the published limit of 100."""
    tensors = filled(names, scale)
    for name in tensors:
        if name.endswith("zero_k_bias"):
            tensors[name].zero_()
        if name.endswith("scale_mul_1H11"):
            tensors[name] = torch.tensor([1.4, 5.0]).view(1, 2, 1, 1)
    return tensors


NEXTSTEP = {  # entries of the published config.json that count, at a small size
    "model_type": "nextstep", "num_attention_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "boi": 37,
    "eoi": 38, "image_placeholder_id": 39, "latent_patch_size": 2, "latent_channels": 4, "latent_size": 8,
    "max_position_embeddings": 64, "attention_bias": True, "o_attention_bias": False, "fm_head_dim": 24,
}  # fmt: skip


def nextstep_names(table=0):
    names = {"embed_tokens.weight": (40, 32), "norm.weight": (32,), "lm_head.weight": (40, 32)}
    for layer in ("layers.0", "layers.1"):
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            names |= affine(f"{layer}.self_attn.{part}_proj", rows, 32)
        names |= {f"{layer}.self_attn.o_proj.weight": (32, 32), f"{layer}.mlp.down_proj.weight": (32, 48)}
        names[f"{layer}.mlp.gate_proj.weight"] = names[f"{layer}.mlp.up_proj.weight"] = (48, 32)
        names[f"{layer}.input_layernorm.weight"] = names[f"{layer}.post_attention_layernorm.weight"] = (32,)
    names |= affine("image_in_projector", 32, 16) | affine("image_out_projector", 32, 32)
    names |= {"gen_pos_embed": (1, table, 32)} if table else {}
    return names | head_names("image_head.net", 16, 32, 24, 3, 1)


def nextstep_folder(path, tensors, **config):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(NEXTSTEP | config))
    return path


def mar_conditions(network, values_BTd, known_BT, class_B):
    """A MAR's conditions (B, T, D) given some tokens: the known ones first, in raster order."""
    counts = known_BT.sum(dim=1)
    place_BK = known_BT.byte().argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
    seen_BK = None if counts.min() == counts.max() else known_BT.gather(1, place_BK)
    known_BKd = values_BTd.gather(1, place_BK[..., None].expand(-1, -1, values_BTd.shape[-1]))
    return network(known_BKd, place_BK, seen_BK, class_B)
