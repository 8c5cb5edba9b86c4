"""Infinity: published layouts with random weights, compared with formulas that read the published tensors; the loop."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from tests.doubles import generators, raises_line
from tests.layouts import DECODED, KLFormulas, ScaleFormulas, affine, filled, ldm_names, scale_tensors
from tests.test_scales import moved
from visspec import ImagePipeline
from visspec.models.image_codes.text_features import T5Features
from visspec.models.infinity import layout as layouts_infinity
from visspec.models.infinity import target as targets
from visspec.models.infinity.network import InfinityConfig, reach_of, schedule
from visspec.models.scales.kv_budget import CacheBudget
from visspec.models.scales.multiscale import ScaleSizes
from visspec.models.scales.reading import ConditionState
from visspec.models.scales.target import ScaleTarget
from visspec.models.var.drafter import SmallVAR
from visspec.types import Request, Sampling

SCALES = ScaleSizes(((1, 1), (2, 2), (3, 2), (4, 3)))
TOL = {"rtol": 1e-5, "atol": 1e-5}
BITS, WIDTH, DEPTH, TEXT = 3, 32, 4, 8


def names(n, chunks=2):
    """The published names and shapes: 4 blocks of 2 heads, text of 8 features and at most 6 tokens, n bits."""
    result = {"cfg_uncond": (6, TEXT), "pos_start": (1, 1, WIDTH), "text_norm.weight": (TEXT,)}
    result |= {"lvl_embed.weight": (15, WIDTH), "text_proj_for_sos.ca.mat_q": (1, 4, WIDTH // 4)}
    result |= {"text_proj_for_sos.ca.mat_kv.weight": (2 * WIDTH, TEXT)} | affine("text_proj_for_ca.0", WIDTH, TEXT)
    result |= affine("text_proj_for_sos.ca.proj", WIDTH, WIDTH) | affine("text_proj_for_ca.2", WIDTH, WIDTH)
    result |= affine("word_embed", WIDTH, n) | affine("shared_ada_lin.1", 6 * WIDTH, WIDTH)
    result |= affine("head_nm.ada_lin.1", 2 * WIDTH, WIDTH) | affine("head", 2 * n, WIDTH)
    result |= {f"text_proj_for_sos.ca.{part}": (WIDTH,) for part in ("v_bias", "zero_k_bias")}
    for i in range(DEPTH):
        block = f"block_chunks.{i * chunks // DEPTH}.module.{i % (DEPTH // chunks)}" if chunks else f"blocks.{i}"
        result |= {f"{block}.sa.scale_mul_1H11": (1, 2, 1, 1), f"{block}.ada_gss": (1, 1, 6, WIDTH)}
        result |= {f"{block}.sa.{part}": (WIDTH,) for part in ("q_bias", "v_bias", "zero_k_bias")}
        result |= {f"{block}.ca.{part}": (WIDTH,) for part in ("v_bias", "zero_k_bias")}
        result |= {f"{block}.sa.mat_qkv.weight": (3 * WIDTH, WIDTH), f"{block}.ca.mat_kv.weight": (2 * WIDTH, WIDTH)}
        for part in ("sa.proj", "ca.mat_q", "ca.proj"):
            result |= affine(f"{block}.{part}", WIDTH, WIDTH)
        result |= affine(f"{block}.ffn.fc1", 4 * WIDTH, WIDTH) | affine(f"{block}.ffn.fc2", WIDTH, 4 * WIDTH)
        result |= affine(f"{block}.ca_norm", WIDTH)
    return result


def published(n=BITS, chunks=2, seed=0, scale=0.2):
    torch.manual_seed(seed)
    return scale_tensors(names(n, chunks), scale)


class Published(ScaleFormulas):
    """Infinity: logits of all positions of one image in one pass, and its inputs."""

    def __init__(self, tensors, scales, bits=BITS, patch=1):
        super().__init__(tensors)
        self.scales, self.bits, self.patch = scales, bits, patch
        result = {name.split(".sa.")[0] for name in tensors if ".sa." in name}
        self.blocks = sorted(result, key=lambda name: [int(i) for i in re.findall(r"\d+", name)])

    def cross(self, q, text, name, heads):
        """q: (H, Q, E); softmax attention to the text, without a bias of the keys."""
        k, v = (text @ self.t[f"{name}.mat_kv.weight"].T).chunk(2, dim=1)
        k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in (k, v + self.t[f"{name}.v_bias"]))
        weight = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.linear((weight @ v).transpose(0, 1).flatten(1), f"{name}.proj")

    def turned(self, x):
        """x: (H, L, E): pairs (2 i, 2 i + 1) by row times speed for the first half of them, then by column."""
        x, pairs = x.clone(), x.shape[-1] // 2
        last, at = self.scales.grids[-1], 0
        for rows, columns in self.scales.grids:
            for i in range(rows):
                for j in range(columns):
                    spot = round(i * last[0] / rows), round(j * last[1] / columns)
                    for p in range(pairs):
                        speed = 10000 ** (-2 * (p % (pairs // 2)) / pairs)
                        angle = spot[p // (pairs // 2)] * speed
                        a, b = x[:, at, 2 * p].clone(), x[:, at, 2 * p + 1].clone()
                        x[:, at, 2 * p] = math.cos(angle) * a - math.sin(angle) * b
                        x[:, at, 2 * p + 1] = math.sin(angle) * a + math.cos(angle) * b
                    at += 1
        return x

    def block(self, x, name, pooled, text, hidden):
        six = self.linear(F.silu(pooled), "shared_ada_lin.1").view(6, -1) + self.t[f"{name}.ada_gss"][0, 0]
        gamma1, gamma2, scale1, scale2, shift1, shift2 = six
        h = self.attended(self.norm(x) * (1 + scale1) + shift1, f"{name}.sa", 2, hidden, self.turned)
        x = x + h * gamma1
        h = self.norm(x) * self.t[f"{name}.ca_norm.weight"] + self.t[f"{name}.ca_norm.bias"]
        q = self.linear(h, f"{name}.ca.mat_q").unflatten(1, (2, -1)).transpose(0, 1)
        x = x + self.cross(q, text, f"{name}.ca", 2)
        h = self.gelu(self.linear(self.norm(x) * (1 + scale2) + shift2, f"{name}.ffn.fc1"))
        return x + self.linear(h, f"{name}.ffn.fc2") * gamma2

    def inputs(self, bits):
        """(features (d, H, W) of the image, inputs (L - 1, n) of all scales after the first) of bits (T,)."""
        n, d, patch = self.bits * self.patch**2, self.bits, self.patch
        finest = (1, *(side * patch for side in self.scales.grids[-1]))
        total, result = 0, []
        for k, ((rows, columns), own) in enumerate(
            zip(self.scales.grids, bits.split([s * n for s in self.scales.sizes]))
        ):
            grid = own.view(rows, columns, d, patch, patch).permute(2, 0, 3, 1, 4).reshape(d, rows * patch, -1)
            code = (2.0 * grid - 1) / math.sqrt(d)
            total = total + F.interpolate(code[None, :, None], size=finest, mode="trilinear")
            if k + 1 < len(self.scales):
                size = (1, *(side * patch for side in self.scales.grids[k + 1]))
                small = F.interpolate(total, size=size, mode="trilinear")[0, :, 0]
                parts = small.unflatten(1, (-1, patch)).unflatten(3, (-1, patch))  # (d, h, patch, w, patch)
                result.append(parts.permute(1, 3, 0, 2, 4).reshape(-1, n))
        return total[0, :, 0], torch.cat(result)

    def logits(self, bits, text):
        """text: (T, F) features, None: as many of the model's own."""
        text = text / (text.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.t["text_norm.weight"]
        pooled = self.cross(self.t["text_proj_for_sos.ca.mat_q"][0][:, None], text, "text_proj_for_sos.ca", 4)[0]
        text = self.linear(self.gelu(self.linear(text, "text_proj_for_ca.0")), "text_proj_for_ca.2")
        x = torch.cat([(pooled + self.t["pos_start"][0, 0])[None], self.linear(self.inputs(bits)[1], "word_embed")])
        level = torch.arange(len(self.scales)).repeat_interleave(torch.tensor(self.scales.sizes))
        x = x + self.t["lvl_embed.weight"][level]
        hidden = torch.where(level[:, None] >= level, 0.0, -math.inf)
        for name in self.blocks:
            x = self.block(x, name, pooled, text, hidden)
        scale, shift = self.linear(F.silu(pooled), "head_nm.ada_lin.1").view(2, -1)
        return self.linear(self.norm(x) * (1 + scale) + shift, "head")


def vae_names(wrapped, bits=BITS):
    """Two levels of 32 and 64 channels, a block each; convolutions and norms in wrappers or not."""
    result = ldm_names(32, (1, 2), 1, bits, attend=None)
    if not wrapped:
        return result
    return {re.sub(r"(norm\w*|conv\w*|nin_shortcut)(\.\w+)$", wrapper, name): size for name, size in result.items()}


def wrapper(match):
    return f"{match[1]}.{'norm' if match[1].startswith('norm') else 'conv'}{match[2]}"


def load(tmp_path, tensors, scales=SCALES):
    save_file(tensors, tmp_path / "infinity.safetensors")
    return layouts_infinity.load_infinity(tmp_path / "infinity.safetensors", scales)


def codec(tmp_path, wrapped=True, patch=1):
    torch.manual_seed(1)
    tensors = filled(vae_names(wrapped), 0.2)
    save_file(tensors | {"quantizer.lfq.mask": torch.tensor([4, 2, 1])}, tmp_path / "vae.safetensors")
    return tensors, layouts_infinity.load_infinity_vae(tmp_path / "vae.safetensors", patch)


def maps_of(bits, n, scales=SCALES):
    sizes = [size * n for size in scales.sizes]
    result = torch.zeros(len(bits), len(sizes) - 1, max(sizes), dtype=torch.long)
    for k, own in enumerate(bits.split(sizes, dim=1)[:-1]):
        result[:, k, : own.shape[1]] = own
    return result


def features_of(texts):
    """Features of words, one a token, padded on the right."""
    lengths = [len(text.split()) for text in texts]
    made = torch.zeros(len(texts), max(lengths), TEXT)
    for b, text in enumerate(texts):
        for t, word in enumerate(text.split()):
            made[b, t] = torch.randn(TEXT, generator=torch.Generator().manual_seed(sum(map(ord, word))))
    return made, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@torch.no_grad()
@pytest.mark.parametrize("chunks, patch", [(2, 1), (0, 1), (1, 2)])
def test_published_network_by_formula(tmp_path, chunks, patch):
    n = BITS * patch**2
    tensors, (_, vae) = published(n, chunks), codec(tmp_path, patch=patch)
    model = load(tmp_path, tensors)
    bits = torch.randint(2, (3, SCALES.total * n))
    family = targets.InfinityImages(model, features_of, vae)
    prompt = family.prompt(["a red cube", "snow"], True, negative=["blue", ""])
    rows = prompt.rows(True)
    reading = ConditionState(model, vae.quantize, rows, 2)
    (whole,) = reading.read(maps_of(bits[:2], n))
    texts = [features_of([text])[0][0] for text in ("a red cube", "snow", "blue")] + [tensors["cfg_uncond"][:1]]
    for row, (b, text) in enumerate(zip((0, 1, 0, 1), texts)):
        expected = Published(tensors, SCALES, patch=patch).logits(bits[b], text).view(-1, 2)
        torch.testing.assert_close(torch.cat([part[row] for part in whole.logits]), expected, **TOL)


@torch.no_grad()
@pytest.mark.parametrize("wrapped, patch", [(True, 1), (False, 2)])
def test_published_autoencoder_by_formula(tmp_path, wrapped, patch):
    _, vae = codec(tmp_path, wrapped, patch)
    torch.manual_seed(1)
    tensors = {name: tensor.double() for name, tensor in filled(vae_names(False), 0.2).items()}
    n, formulas = BITS * patch**2, KLFormulas(tensors)
    bits = torch.randint(2, (1, SCALES.total * n))
    features, _ = Published({}, SCALES, patch=patch).inputs(bits[0])
    torch.testing.assert_close(vae.quantize.features(bits, SCALES)[0], features, **TOL)
    hidden = formulas.decode(features[None].double(), **DECODED)
    result = vae.double().decode(bits, SCALES)
    torch.testing.assert_close(result.float(), hidden.clamp(-1, 1).float(), rtol=1e-4, atol=1e-5)
    again = vae.quantize.encode(vae.quantize.features(bits, SCALES), SCALES)
    assert again.shape == bits.shape and float((again == bits).float().mean()) > 0.6


def test_published_schedules():
    assert schedule().total == 10521 and schedule(1.0, "0.06M").grids[-1] == (16, 16)
    assert schedule(0.75).grids[-1] == (54, 72) and schedule(1.33, "0.25M").grids[-1] == (36, 27)
    assert reach_of(schedule(0.5, "0.25M")) == (45, 90) and reach_of(SCALES) == (4, 3)
    with pytest.raises(ValueError, match="pixels: got '2M'"):
        schedule(1.0, "2M")
    with torch.device("meta"):
        config = InfinityConfig(2048, 32, 16, schedule())
        model = layouts_infinity.Infinity(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e7) == 220  # "2B"


def test_what_does_not_fit_is_refused(tmp_path):
    tensors = published()
    with pytest.raises(ValueError, match=r"unknown tensor 'block_chunks\.0\.module\.0\.ca_gamma'"):
        load(tmp_path, tensors | {"block_chunks.0.module.0.ca_gamma": torch.zeros(WIDTH)})
    with pytest.raises(ValueError, match=r"expected at most 15, beginning with one position"):
        load(tmp_path, tensors, ScaleSizes.square(2, 3))


# --- the loop ---------------------------------------------------------------------------------------------------------


def request(family, texts, sampling, scales=4):
    prompt = family.prompt(texts, sampling.guidance != 1.0)
    own = None if sampling.greedy else generators(len(texts))
    return Request(prompt, prompt.ids, scales, sampling, generators=own)


@pytest.fixture
def parts(tmp_path):
    return load(tmp_path, published(scale=0.25)), codec(tmp_path)[1]


def test_infinity_pipeline(parts):
    model, vae = parts
    asked = {"prompt": ["a red cube", "snow"], "seed": [1, 2], "output_type": "latent", "guidance_scale": 2.0}

    def drawn(drafter=None, **more):
        return ImagePipeline(model, features_of, drafter, parts={"codec": vae} | more, levels=3)(**asked)

    plainly, small = drawn(), moved(model, 0.01)
    assert plainly.stats[0].guarantee == "exact" and plainly.tokens[0].shape == (SCALES.total * BITS,)
    itself = drawn(SmallVAR(model))
    near = drawn(SmallVAR(small))
    for out in (itself, near):
        assert all(torch.equal(a, b) for a, b in zip(out.tokens, plainly.tokens)) and out.traces[0].faults == 0
    assert itself.stats[0].rounds < plainly.stats[0].rounds
    mixed, all_model = drawn(refiner=small, handover=2), drawn(refiner=small, handover=4)
    assert mixed.stats[0].guarantee == "exact for the declared target"
    assert all(torch.equal(a, b) for a, b in zip(all_model.tokens, plainly.tokens))
    assert all(torch.equal(a[: 5 * BITS], b[: 5 * BITS]) for a, b in zip(mixed.tokens, plainly.tokens))
    full = drawn(budget=CacheBudget((SCALES.begins[1:-1],) * DEPTH))
    assert all(torch.equal(a, b) for a, b in zip(full.tokens, plainly.tokens))
    pixels = ImagePipeline(model, features_of, parts={"codec": vae})(**asked | {"output_type": "np"})
    assert pixels.images[0].shape == (8, 6, 3)


@torch.no_grad()
def test_refiner_reads_earlier_scales(parts, tmp_path):
    model, vae = parts
    tensors = published(scale=0.25, seed=5)
    small = load(tmp_path, tensors)
    target = ScaleTarget(targets.InfinityImages(model, features_of, vae, refiner=small, handover=2))
    prompt = target.family.prompt(["snow"], False)
    bits = torch.randint(2, (1, SCALES.total * BITS))
    reading = target.initial_state(prompt, Sampling(1.0), small)
    (group,) = reading.read(maps_of(bits, BITS)[:, :2], last=True)
    expected = Published(tensors, SCALES).logits(bits[0], features_of(["snow"])[0][0])[5:11].reshape(-1, 2)
    assert group.first == 2
    torch.testing.assert_close(group.logits[0][0], expected, **TOL)


def test_wrong_prompts_and_models(parts):
    model, vae = parts
    family = targets.InfinityImages(model, features_of, vae)
    for words, make in (
        ("codec: got NoneType, expected Infinity's", lambda: targets.InfinityImages(model, features_of)),
        ("processor: got None", lambda: targets.InfinityImages(model, None, vae).prompt(["snow"], True)),
        ("prompt: got 7 tokens, expected at most 6", lambda: family.check(family.prompt(["a " * 7], True), None, 2.0)),
    ):
        with raises_line(words):
            make()


def test_t5_features_alone_and_in_batch():
    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1, "a": 2, "red": 3, "cube": 4, "snow": 5}, "<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = T5EncoderModel(
            T5Config(vocab_size=6, d_model=TEXT, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        ).eval()
    given = T5Features(tokenizer, encoder)
    features, real = given(["snow", "a red cube"])
    assert real.tolist() == [[True, False, False], [True] * 3] and features.shape == (2, 3, TEXT)
    torch.testing.assert_close(features[0, :1], given(["snow"])[0][0], **TOL)
