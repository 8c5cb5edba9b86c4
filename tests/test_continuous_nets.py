"""MAR, KL autoencoders and NextStep-1 in published layouts with random numbers, against formulas on the tensors."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaModel

from tests.doubles import raises_line
from tests.layouts import (
    DECODED,
    ENCODED,
    TINY_KL,
    KLFormulas,
    Tensors,
    filled,
    kl_names,
    mar_conditions,
    mar_names,
    nextstep_folder,
    nextstep_names,
)
from visspec.models.codecs import vq_layout as layouts_vq
from visspec.models.mar import layout as layouts_mar
from visspec.models.mar import network as mar
from visspec.models.nextstep import flow
from visspec.models.nextstep import layout as layouts_nextstep
from visspec.models.published_tensors import Weights, rename
from visspec.models.vectors.diffusion_head import schedule

SMALL = mar.MARConfig(32, 2, 4, head_width=24, head_depth=2, size=4, tokens=9, buffer=3, classes=5)


# --- schedules ------------------------------------------------------------------------------------------------------


def published_schedule(count, total=1000):
    """iDDPM's cosine schedule and its respacing, by their formulas, in numpy: (times, betas, levels)."""

    def level(t):
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = np.array([min(1 - level((i + 1) / total) / level(i / total), 0.999) for i in range(total)])
    levels = np.cumprod(1 - betas)
    times, now = [], 0.0
    for _ in range(count):
        times.append(round(now))
        now += (total - 1) / (count - 1)
    kept = levels[times]
    return np.array(times), 1 - kept / np.append(1.0, kept[:-1]), kept


@pytest.mark.parametrize("count", [2, 20, 21, 50, 61, 100, 250, 1000])  # 21 and 61 meet ties, rounded as sums round
@pytest.mark.parametrize("learned", [False, True])
def test_schedules_are_respaced_as_published(count, learned):
    times, beta, level = published_schedule(count)
    before = np.append(1.0, level[:-1])
    variance = beta * (1 - before) / (1 - level)
    variance[0] = variance[1]
    result = schedule(count, learned)
    steps = result.steps
    assert result.times.tolist() == times[::-1].tolist()
    for name, ours, expected in (
        ("keep", steps.keep, (1 - before) * np.sqrt(1 - beta) / (1 - level)),
        ("move", steps.move, beta * np.sqrt(before) / (1 - level)),
        ("low", steps.low, np.log(variance) / 2),
        ("high", steps.high, (np.log(beta) if learned else np.log(variance)) / 2),
        ("signal", result.signal, np.sqrt(level)),
        ("noise", result.noise, np.sqrt(1 - level)),
    ):
        np.testing.assert_allclose(ours.double().numpy()[::-1], expected, rtol=2e-6, atol=1e-7, err_msg=name)


# --- MAR --------------------------------------------------------------------------------------------------------------


class Published(Tensors):
    """MAR, one image at a time."""

    def __init__(self, tensors, heads, buffer):
        super().__init__(tensors)
        self.heads, self.buffer = heads, buffer

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.t[f"{name}.weight"], self.t[f"{name}.bias"], 1e-6)

    def blocks(self, x, side):
        depth = len([name for name in self.t if re.fullmatch(rf"{side}_blocks\.\d+\.norm1\.bias", name)])
        for name in [f"{side}_blocks.{i}" for i in range(depth)]:
            qkv = self.linear(self.norm(x, f"{name}.norm1"), f"{name}.attn.qkv").chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in qkv)
            seen = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v
            x = x + self.linear(seen.transpose(0, 1).flatten(1), f"{name}.attn.proj")
            inner = self.linear(self.norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")
            x = x + self.linear(inner * (1 + torch.erf(inner / 2**0.5)) / 2, f"{name}.mlp.fc2")
        return self.norm(x, f"{side}_norm")

    def conditions(self, values, known, label):
        """(T, d), (T,), a class or -1 -> (T, D)."""
        first = self.t["fake_latent"][0] if label < 0 else self.t["class_emb.weight"][label]
        x = torch.cat([first.repeat(self.buffer, 1), self.linear(values, "z_proj")])
        x = self.norm(x + self.t["encoder_pos_embed_learned"][0], "z_proj_ln")
        kept = torch.cat([torch.ones(self.buffer, dtype=torch.bool), known])
        encoded = self.linear(self.blocks(x[kept], "encoder"), "decoder_embed")
        full = self.t["mask_token"][0].repeat(len(kept), 1)
        full[kept] = encoded
        x = self.blocks(full + self.t["decoder_pos_embed_learned"][0], "decoder")
        return x[self.buffer :] + self.t["diffusion_pos_embed_learned"][0]

    def head(self, x, t, condition, name="diffloss.net"):
        half = torch.arange(128) / 128
        angle = t[:, None].float() * torch.exp(-math.log(10000) * half)
        y = self.linear(torch.cat([angle.cos(), angle.sin()], -1), f"{name}.time_embed.mlp.0")
        y = self.linear(F.silu(y), f"{name}.time_embed.mlp.2") + self.linear(condition, f"{name}.cond_embed")
        x, i = self.linear(x, f"{name}.input_proj"), 0
        while (block := f"{name}.res_blocks.{i}") + ".in_ln.weight" in self.t:
            shift, scale, gate = self.linear(F.silu(y), f"{block}.adaLN_modulation.1").chunk(3, -1)
            h = self.linear(self.norm(x, f"{block}.in_ln") * (1 + scale) + shift, f"{block}.mlp.0")
            x, i = x + gate * self.linear(F.silu(h), f"{block}.mlp.2"), i + 1
        shift, scale = self.linear(F.silu(y), f"{name}.final_layer.adaLN_modulation.1").chunk(2, -1)
        return self.linear(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift, f"{name}.final_layer.linear")


@pytest.fixture(scope="module")
def published():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return filled(mar_names(SMALL), 0.1)


@pytest.fixture
def network(published, tmp_path):
    save_file(published, tmp_path / "mar.safetensors")
    return layouts_mar.load_mar(tmp_path / "mar.safetensors", heads=SMALL.heads)


@torch.no_grad()
@pytest.mark.parametrize("counts", [(0, 0, 0), (4, 4, 4), (0, 3, 9), (8, 1, 2)])
def test_mar_loads_as_published(published, network, counts):
    torch.manual_seed(1)
    assert network.config == mar.MARConfig(**vars(SMALL) | {"hidden": 128})
    values, labels = torch.randn(3, 9, 4), torch.tensor([2, mar.UNCONDITIONAL, 0])
    known = torch.zeros(3, 9, dtype=torch.bool)
    for row, count in enumerate(counts):
        known[row, torch.randperm(9)[:count]] = True
    reference = Published(published, SMALL.heads, SMALL.buffer)
    expected = torch.stack([reference.conditions(values[b], known[b], int(labels[b])) for b in range(3)])
    values[~known] = float("nan")  # what is not known is not read
    found = mar_conditions(network, values, known, labels)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    x, t = torch.randn(3, 4), torch.tensor([0.0, 7.0, 999.0])
    torch.testing.assert_close(network.head(x, t, found[:, 5]), reference.head(x, t, expected[:, 5]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "size, millions, head, tensors", [("B", 207.9, 35.7, 364), ("L", 478.3, 72.2, None), ("H", 942.4, 151.2, None)]
)
def test_published_sizes_of_mar(size, millions, head, tensors):
    with torch.device("meta"):
        network = mar.MAR(mar.SIZES[size])
    result = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    names = mar_names(mar.SIZES[size])
    assert result == names
    assert tensors in (None, len(result))
    assert round(sum(map(math.prod, result.values())) / 1e6, 1) == pytest.approx(millions, abs=0.11)
    assert round(sum(p.numel() for p in network.head.parameters()) / 1e6, 1) == pytest.approx(head, abs=0.11)
    meta = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
    inferred = layouts_mar.config_of(Weights("here", rename(meta, ())), None)
    assert inferred == mar.MARConfig(**vars(mar.SIZES[size]) | {"hidden": 4 * inferred.width})


def test_what_does_not_fit_mar_is_refused(published, tmp_path):
    file = tmp_path / "mar.safetensors"

    for changed, heads, words in (
        (published | {"head.weight": torch.zeros(1)}, 4, r"unknown tensor 'head\.weight'"),
        (published | {"fake_latent": torch.full((1, 32), float("nan"))}, 4, "not finite"),
        (published, None, "heads: .* width 32, expected heads="),
    ):
        save_file(changed, file)
        with raises_line(words):
            layouts_mar.load_mar(file, heads=heads)


# --- KL autoencoders -------------------------------------------------------------------------------------------------


KL16 = (128, (1, 1, 2, 2, 4), 2, 16, (4,))


@torch.no_grad()
@pytest.mark.parametrize("quantised", [True, False])
def test_kl_autoencoders_load_as_published(tmp_path, quantised):
    torch.manual_seed(0)
    tensors = filled(kl_names(*TINY_KL, quantised=quantised), 0.1)
    save_file(tensors | {"loss.logvar": torch.zeros(())}, tmp_path / "kl16.safetensors")
    model = layouts_mar.load_mar_vae(tmp_path / "kl16.safetensors")
    assert model.config.scaling_factor == 0.2325
    plain = tensors if quantised else tensors | {  # a 1 x 1 convolution that changes nothing
        f"{name}.{what}": value for name, n in (("quant_conv", 8), ("post_quant_conv", 4))
        for what, value in (("weight", torch.eye(n)[..., None, None]), ("bias", torch.zeros(n)))
    }  # fmt: skip
    formulas = KLFormulas(plain)
    latent, pixels = torch.randn(2, 4, 3, 5), torch.rand(2, 3, 8, 12) * 2 - 1
    expected = formulas.decode(formulas.conv(latent, "post_quant_conv"), **DECODED)
    torch.testing.assert_close(model.decode(latent).sample, expected, rtol=1e-4, atol=2e-5)
    expected = formulas.encode(pixels, **ENCODED)
    torch.testing.assert_close(model.encode(pixels).latent_dist.parameters, expected, rtol=1e-4, atol=2e-5)


def test_autoencoder_sizes():
    names = kl_names(*KL16)
    meta = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
    config = layouts_vq.stock_settings(Weights("here", rename(meta, ())))
    assert (len(names), sum(map(math.prod, names.values()))) == (312, 66_456_019)
    with torch.device("meta"):
        model = layouts_vq.AutoencoderKL(**config)
    assert (len(model.state_dict()), sum(p.numel() for p in model.parameters())) == (312, 66_456_019)
    assert config["down_block_types"] == ("DownEncoderBlock2D",) * 4 + ("AttnDownEncoderBlock2D",)


def test_autoencoder_misfits(tmp_path):
    tensors, file = filled(kl_names(*TINY_KL)), tmp_path / "kl.safetensors"
    save_file(tensors | {"quantize.weight": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"unknown tensor 'quantize\.weight'"):
        layouts_mar.load_mar_vae(file)


# --- NextStep-1 -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("table, used", [(0, False), (9, False), (9, True)])
@pytest.mark.parametrize("normalised", [False, True])
def test_nextstep_loads_as_published(tmp_path, table, used, normalised):
    torch.manual_seed(0)
    tensors = filled(nextstep_names(table), 0.1)
    folder = nextstep_folder(tmp_path / "a", tensors, use_gen_pos_embed=used)
    model = layouts_nextstep.load_nextstep(folder, normalised=normalised)
    assert (model.config.size, model.config.patch, model.config.image_start) == (16, 2, 37)
    config = LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, rms_norm_eps=1e-5,
                         num_attention_heads=4, num_key_value_heads=2, rope_theta=1e6, attention_bias=True)  # fmt: skip
    llama = LlamaModel(config).eval()  # as the authors', but their output projections have no bias
    own = {name: torch.zeros(32) for name in llama.state_dict() if name.endswith("o_proj.bias")}
    llama.load_state_dict(own | {n: t for n, t in tensors.items() if re.match(r"embed_tokens|layers|norm", n)})
    ids, values = torch.randint(36, (2, 5)), torch.randn(2, 3, 16)
    reference = Published(tensors, 4, 0)
    drawn = (values - values.mean(-1, keepdim=True)) / (values.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    image = reference.linear(drawn if normalised else values, "image_in_projector")
    embeds = torch.cat([llama.embed_tokens(ids), image], dim=1)
    hidden = llama(inputs_embeds=embeds).last_hidden_state
    torch.testing.assert_close(model.embed(values), image, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.model(inputs_embeds=embeds).last_hidden_state, hidden, rtol=0, atol=1e-5)

    index = torch.tensor([[0, 1, 2], [4, 5, 6]])
    place = tensors["gen_pos_embed"][0][index] if used else 0
    expected = reference.linear(hidden[:, -3:] + place, "image_out_projector")
    torch.testing.assert_close(model.conditions(hidden[:, -3:], index), expected, rtol=0, atol=1e-5)
    x, t = torch.randn(3, 16), torch.tensor([0.0, 0.3, 0.96])
    expected, condition = reference.head(x, t, expected[0], "image_head.net"), expected[0]
    torch.testing.assert_close(model.head(x, t, condition), expected, rtol=0, atol=1e-5)


def test_nextstep_misfits(tmp_path):
    tensors = filled(nextstep_names())

    bias = {"layers.0.self_attn.o_proj.bias": torch.zeros(32)}
    for words, more, config in (
        ("unknown tensor 'layers.0.self_attn.o_proj.bias'", bias, {}),
        ("has no 'boi'", {}, {"boi": None}), ("has no 'latent_patch_size'", {}, {"latent_patch_size": None}),
        ("has no tensor 'gen_pos_embed'", {}, {"use_gen_pos_embed": True}),
        ("has shape", {}, {"num_attention_heads": 5}),
    ):  # fmt: skip
        nextstep_folder(tmp_path / "a", tensors | more, **config)
        with raises_line(words):
            layouts_nextstep.load_nextstep(tmp_path / "a", normalised=False)


@torch.no_grad()
def test_the_image_tokenizer_of_nextstep(tmp_path):
    tensors = filled(kl_names(*TINY_KL[:-1], (), quantised=False), 0.1)
    folder = nextstep_folder(tmp_path / "vae", tensors)
    with pytest.raises(ValueError, match="scaling_factor: got None, expected a finite number above 0"):
        layouts_nextstep.load_nextstep_vae(folder)
    nextstep_folder(folder, tensors, scaling_factor=0.4, shift_factor=0.1)
    model = layouts_nextstep.load_nextstep_vae(folder)
    assert (model.config.scaling_factor, model.config.shift_factor) == (0.4, 0.1)
    latent = torch.randn(1, 4, 3, 3)
    expected = KLFormulas(tensors).decode(latent, **DECODED)
    torch.testing.assert_close(model.decode(latent).sample, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shift", [1.0, 3.2])
@pytest.mark.parametrize("count", [2, 20, 50])
def test_flow_schedules(count, shift):
    torch.manual_seed(0)
    x, v = torch.randn(2, 7, dtype=torch.float64)

    def check(schedule, i, t, mean, deviation):
        steps = schedule.steps
        assert steps.fixed
        of_point, of_output = (part[i] for part in schedule.estimate())
        torch.testing.assert_close(schedule.times[i].item(), t)
        result = steps.keep[i] * x + steps.move[i] * (of_point * x + of_output * v)
        torch.testing.assert_close(result, mean, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(steps.low[i].exp().item(), deviation, rtol=1e-5, atol=1e-7)

    grid = [i / (count - 1) * 0.96 for i in range(count)]
    grid = [t / (shift - (shift - 1) * t) for t in grid]
    first = flow.flow_schedule(count, shift)
    for i, (t, after) in enumerate(pairwise(grid)):
        score = (t * v - x) / ((1 - t) ** 2 + t * (1 - t))
        mean = x + (v + (1 - t) * score) * (after - t)
        check(first, i, t, mean, math.sqrt(2 * (1 - t)) * math.sqrt(after - t))
    check(first, count - 1, grid[-1], x + 0.04 * v, flow.QUIET)  # the deviation is ours: theirs adds no noise
    assert first.steps.noisy and not flow.flow_schedule(count, shift, noisy=False).steps.noisy

    grid = [i / count for i in range(count)]
    grid = [t / (shift - (shift - 1) * t) for t in grid] + [1.0]
    second = flow.flow_schedule_v11(count, shift)
    for i, (t, after) in enumerate(pairwise(grid)):
        noise, value, sigma = x - v * t, x + v * (1 - t), 1 - t
        deviation = math.sqrt(sigma / (1 - (grid[-2] if sigma == 1 else sigma))) * 0.8
        mean = noise * (1 - after) + value * after - deviation**2 * (after - t) / (2 * sigma) * noise
        check(second, i, t, mean, deviation * math.sqrt(after - t))
