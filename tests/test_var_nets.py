"""VAR's networks: published layouts with random weights, compared with formulas that read the published tensors."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.doubles import raises_line
from tests.layouts import DECODED, ENCODED, KLFormulas, ScaleFormulas, affine, conv, filled, ldm_names, scale_tensors
from visspec.models.scales.multiscale import MultiScaleShape, MultiScaleVAE, Quantizer, ScaleSizes
from visspec.models.scales.reading import ConditionState
from visspec.models.var import layout as layouts_var
from visspec.models.var.network import VAR, VARConfig

SIDES = (1, 2, 3, 4)
SMALL = VARConfig(32, 2, 2, ScaleSizes.square(*SIDES), codes=16, code_size=4, classes=5)
TOL = {"rtol": 1e-5, "atol": 1e-5}


def var_names(config):
    """The published names and shapes."""
    width, total, depth = config.width, config.scales.total, config.depth
    names = {"pos_start": (1, config.scales.sizes[0], width), "pos_1LC": (1, total, width)}
    names |= {"class_emb.weight": (config.classes + 1, width), "lvl_embed.weight": (len(config.scales), width)}
    names |= affine("word_embed", width, config.code_size) | affine("head", config.codes, width)
    names |= affine("head_nm.ada_lin.1", 2 * width, width)
    names |= affine("shared_ada_lin.1", 6 * width, width) if config.shared else {}
    for block in (f"blocks.{i}" for i in range(depth)):
        names |= {f"{block}.attn.scale_mul_1H11": (1, config.heads, 1, 1)}
        names |= {f"{block}.attn.{part}": (width,) for part in ("q_bias", "v_bias", "zero_k_bias")}
        names |= {f"{block}.attn.mat_qkv.weight": (3 * width, width)}
        names |= affine(f"{block}.attn.proj", width, width)
        names |= affine(f"{block}.ffn.fc1", 4 * width, width) | affine(f"{block}.ffn.fc2", width, 4 * width)
        own = {f"{block}.ada_gss": (1, 1, 6, width)}
        names |= own if config.shared else affine(f"{block}.ada_lin.1", 6 * width, width)
    return names


def published(config, scale=0.3):
    torch.manual_seed(0)
    tensors = scale_tensors(var_names(config), scale)
    levels = torch.arange(len(config.scales)).repeat_interleave(torch.tensor(config.scales.sizes))[None]
    hidden = torch.where(levels[0][:, None] >= levels[0], 0.0, -math.inf)[None, None]
    return tensors | {"lvl_1L": levels, "attn_bias_for_masking": hidden}


class Published(ScaleFormulas):
    """VAR: logits of all positions of one image in one pass."""

    def __init__(self, tensors, heads):
        super().__init__(tensors)
        self.heads = heads
        self.depth = len([name for name in tensors if re.fullmatch(r"blocks\.\d+\.attn\.mat_qkv\.weight", name)])

    def block(self, x, name, given):
        """x: (L, C)."""
        message = F.silu(given)
        if f"{name}.ada_gss" in self.t:
            six = self.linear(message, "shared_ada_lin.1").view(6, -1) + self.t[f"{name}.ada_gss"][0, 0]
        else:
            six = self.linear(message, f"{name}.ada_lin.1").view(6, -1)
        gamma1, gamma2, scale1, scale2, shift1, shift2 = six
        hidden = self.t["attn_bias_for_masking"][0, 0]
        h = self.attended(self.norm(x) * (1 + scale1) + shift1, f"{name}.attn", self.heads, hidden)
        x = x + h * gamma1
        h = self.linear(self.norm(x) * (1 + scale2) + shift2, f"{name}.ffn.fc1")
        return x + self.linear(self.gelu(h), f"{name}.ffn.fc2") * gamma2

    def logits(self, inputs, label):
        """inputs: (L - first, c), what the scales after the first are made of."""
        given = self.t["class_emb.weight"][label]
        x = torch.cat([given + self.t["pos_start"][0], self.linear(inputs, "word_embed")])
        x = x + self.t["lvl_embed.weight"][self.t["lvl_1L"][0]] + self.t["pos_1LC"][0]
        for i in range(self.depth):
            x = self.block(x, f"blocks.{i}", given)
        scale, shift = self.linear(F.silu(given), "head_nm.ada_lin.1").view(2, -1)
        return self.linear(self.norm(x) * (1 + scale) + shift, "head")


def vq_names(shape):
    """The published names of the autoencoder: LDM's, with queries, keys and values in one, and 3 x 3 around."""

    def fused(name, c):
        return affine(f"{name}.norm", c) | conv(f"{name}.qkv", 3 * c, c, 1, 1) | conv(f"{name}.proj_out", c, c, 1, 1)

    top = (len(shape.multipliers) - 1,)
    names = ldm_names(
        shape.channels, shape.multipliers, shape.blocks, shape.size, attended=top, attend=fused, both=True
    )
    for name in ("quant_conv", "post_quant_conv"):
        names |= conv(name, shape.size, shape.size, shape.kernel, shape.kernel)
    for i in range(shape.shared):
        names |= conv(f"quantize.quant_resi.qresi_ls.{i}", shape.size, shape.size, 3, 3)
    names["quantize.ema_vocab_hit_SV"] = (4, shape.codes)
    return names | {"quantize.embedding.weight": (shape.codes, shape.size)}


SCALES = {
    256: ScaleSizes.square(1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    512: ScaleSizes.square(1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
}
TINY = MultiScaleShape(16, 4, channels=32, multipliers=(1, 2), blocks=1)
# ticks 1/12, 13/36, 23/36, 11/12 and k / 9; 2/9 and 7/9 lie between two, and the published rounding takes the later
NEAREST = (0, 0, 1, 1, 1, 2, 2, 3, 3, 3)


class VQFormulas(KLFormulas):
    """VAR's autoencoder on published tensors."""

    def attention(self, x, name):
        if f"{name}.qkv.weight" not in self.t:
            return x
        q, k, v = (part.flatten(2) for part in self.conv(self.norm(x, f"{name}.norm"), f"{name}.qkv").chunk(3, 1))
        weight = (q.transpose(1, 2) @ k * q.shape[1] ** -0.5).softmax(-1)
        return x + self.conv((v @ weight.transpose(1, 2)).unflatten(2, x.shape[-2:]), f"{name}.proj_out")

    def part(self, codes, k, side, sides):
        """What scale k adds, its convolution the nearest to k / (K - 1)."""
        h = self.t["quantize.embedding.weight"][codes].movedim(-1, 1).unflatten(2, (side, side))
        if k < len(sides) - 1:
            h = F.interpolate(h, size=(sides[-1], sides[-1]), mode="bicubic")
        ticks = torch.linspace(1 / 12, 11 / 12, 4)
        nearest = int((ticks - k / (len(sides) - 1)).abs().argmin())
        return 0.5 * h + 0.5 * self.conv(h, f"quantize.quant_resi.qresi_ls.{nearest}", padding=1)

    def inputs(self, codes, sides):
        """(features of the whole image, inputs (B, L - 1, c) of all scales after the first)."""
        total, result = 0, []
        for k, (side, own) in enumerate(zip(sides, codes.split([s * s for s in sides], dim=1))):
            total = total + self.part(own, k, side, sides)
            if k + 1 < len(sides):
                result.append(F.interpolate(total, size=(sides[k + 1],) * 2, mode="area").flatten(2).transpose(1, 2))
        return total, torch.cat(result, dim=1)


@pytest.fixture(scope="module")
def vae_tensors():
    torch.manual_seed(1)
    return filled(vq_names(TINY), 0.2)


@pytest.fixture(scope="module")
def vae(vae_tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("vae") / "vae.safetensors"
    save_file(vae_tensors, path)
    return layouts_var.load_var_vae(path)


def loaded(config, tmp_path):
    tensors = published(config)
    save_file(tensors, tmp_path / "var.safetensors")
    return tensors, layouts_var.load_var(tmp_path / "var.safetensors")


def doubled(tensors):
    """In double precision, where both sides differ by nothing but an error."""
    return {name: part.double() if part.is_floating_point() else part for name, part in tensors.items()}


@torch.no_grad()
@pytest.mark.parametrize("shared", [False, True])
def test_var_formulas(tmp_path, vae, vae_tensors, shared):
    config = VARConfig(**{**vars(SMALL), "shared": shared, "hidden": 128})
    tensors, model = loaded(config, tmp_path)
    assert model.config == config
    tensors, vae_tensors = doubled(tensors), doubled(vae_tensors)
    model, vae = model.double(), copy.deepcopy(vae).double()
    codes, classes = torch.randint(16, (2, 30)), torch.tensor([3, 5])
    _, inputs = VQFormulas(vae_tensors).inputs(codes, SIDES)
    maps = torch.zeros(2, 3, 16, dtype=torch.long)
    for k, own in enumerate(codes.split(config.scales.sizes, dim=1)[:-1]):
        maps[:, k, : own.shape[1]] = own
    reading = ConditionState(model, vae.quantize, classes, 2)
    (whole,) = reading.read(maps)
    for b, label in enumerate(classes.tolist()):
        expected = Published(tensors, config.heads).logits(inputs[b], label)
        torch.testing.assert_close(torch.cat([part[b] for part in whole.logits]), expected, **TOL)


@torch.no_grad()
def test_autoencoder_formulas(vae, vae_tensors):
    """In float64."""
    tensors, vae = doubled(vae_tensors), copy.deepcopy(vae).double()
    formulas = VQFormulas(tensors)
    scales, codes = ScaleSizes.square(*SIDES), torch.randint(16, (2, 30))
    features, _ = formulas.inputs(codes, SIDES)
    torch.testing.assert_close(vae.quantize.features(codes, scales), features, **TOL)
    hidden = formulas.conv(features, "post_quant_conv", padding=1)
    expected = formulas.decode(hidden, **DECODED).clamp(-1, 1)
    torch.testing.assert_close(vae.decode(codes, scales), expected, **TOL)
    pixels = torch.rand(2, 3, 8, 8).double() * 2 - 1
    nothing = {"quant_conv.weight": torch.eye(4).double()[..., None, None], "quant_conv.bias": torch.zeros(4).double()}
    formulas.t = tensors | nothing  # the formula's is 1 x 1
    left = formulas.encode(pixels, **ENCODED)
    left = F.conv2d(left, tensors["quant_conv.weight"], tensors["quant_conv.bias"], padding=1)
    result = []
    for k, side in enumerate(SIDES):
        at = F.interpolate(left, size=(side, side), mode="area").flatten(2).transpose(1, 2)
        gaps = (at[:, :, None] - tensors["quantize.embedding.weight"]).square().sum(-1)
        result.append(gaps.argmin(-1))
        left = left - formulas.part(result[-1], k, side, SIDES)
    assert torch.equal(vae.encode(pixels, scales), torch.cat(result, dim=1))


@torch.no_grad()
def test_published_convolutions_of_scales():
    quantizer, scales = Quantizer(4, 4), SCALES[256]
    for i, layer in enumerate(quantizer.quant_resi["qresi_ls"]):
        layer.weight.data.zero_()
        layer.bias.data.fill_(2.0 * i)
    result = [int(quantizer.smooth(k, scales, torch.zeros(1, 4, 2, 2)).detach().mean()) for k in range(10)]
    assert tuple(result) == NEAREST


def test_published_sizes():
    for side, total in ((256, 680), (512, 2240)):
        assert SCALES[side].total == total == sum(size for size in SCALES[side].sizes)
    with torch.device("meta"):
        model, vae = VAR(VARConfig(1024, 16, 16, SCALES[256])), MultiScaleVAE(MultiScaleShape())
    result = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert result == var_names(model.config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e5) == 3103  # 310.3 millions
    assert round(sum(p.numel() for p in vae.parameters()) / 1e5) == 1089  # 108.9 millions
    names = vq_names(MultiScaleShape())
    sizes = sum(math.prod(s) for name, s in names.items() if "ema" not in name)
    assert sizes == sum(p.numel() for p in vae.parameters())


def test_bad_transformer(tmp_path):
    tensors, file = published(SMALL), tmp_path / "var.safetensors"

    def refused(words, changed):
        save_file(changed, file)
        with raises_line(words):
            layouts_var.load_var(file)

    refused(r"unknown tensor 'blocks\.0\.attn\.k_bias'", tensors | {"blocks.0.attn.k_bias": torch.zeros(32)})
    refused(r"lvl_1L of .* expected the level", tensors | {"lvl_1L": tensors["lvl_1L"].flip(1)})
    config = VARConfig(**{**vars(SMALL), "scales": ScaleSizes(((1, 1), (2, 3)))})
    refused(r"has maps of \(1, 6\) codes, expected squares", published(config))


def test_bad_autoencoder(tmp_path, vae_tensors):
    save_file(vae_tensors | {"quantize.beta": torch.zeros(1)}, tmp_path / "vae.safetensors")
    with raises_line("unknown tensor 'quantize.beta'"):
        layouts_var.load_var_vae(tmp_path / "vae.safetensors")


def test_wrong_settings_are_refused():
    for words, make in (
        ("scales: got 0 codes in 0 maps", lambda: ScaleSizes(())),
        ("scales: got 1 codes in 2 maps", lambda: ScaleSizes.square(1, 0)),
    ):
        with raises_line(words):
            make()
