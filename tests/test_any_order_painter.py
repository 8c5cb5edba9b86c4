"""The any-order painter: its folder, the pipeline's habits, and published weights."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, JanusVQVAEConfig

from tests.any_order import distributions
from tests.doubles import raises_line
from tests.layouts import gpt_reference, turn_by_hand
from tests.test_any_order import network
from tests.tiny_images import painter_processor
from visspec import ImagePipeline, registry
from visspec.api import saving
from visspec.loop.visits import halton
from visspec.models.llamagen import layout as layouts_llamagen
from visspec.models.llamagen.network import RandAR
from visspec.models.randar.layout import RandARImageConfig, RandARImageModel

SIDE, PIXELS, CODES = 6, 48, 24
TEXTS = ["a photo of a red ring", "a photo of a blue cross and a green star"]
NETWORK = {"layers": 2, "heads": 2, "hidden_size": 32, "intermediate": 48}


def fresh(seed=0):
    vq = JanusVQVAEConfig(
        embed_dim=4, num_embeddings=CODES, latent_channels=32, base_channels=32, channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1, num_patches=SIDE,
    )  # fmt: skip
    vocab = len(painter_processor().tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RandARImageModel(RandARImageConfig(NETWORK, vocab, 12, 16, vq)).eval()
        for weight in model.net.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 1.4 * weight.shape[-1] ** -0.5)
    model.generation_config = GenerationConfig(guidance_scale=2.0)
    return model


@pytest.fixture(scope="module")
def pipe():
    with torch.inference_mode(False):
        return ImagePipeline(fresh(), painter_processor())


# --- habits -----------------------------------------------------------------------------------------------------------


def test_seeds_batches_and_drafters(pipe):
    together = pipe(TEXTS, num_images_per_prompt=2, seed=7)
    assert together.images[0].size == (PIXELS, PIXELS) and together.seeds == [7, 8, 9, 10]
    assert len({tuple(tokens.tolist()) for tokens in together.tokens}) == 4
    for drafter in ("none", "ahead:levels=3", "jacobi:window=4", "ngram"):
        alone = pipe(TEXTS[1], seed=9, drafter=drafter, output_type="latent")
        assert torch.equal(alone.tokens[0], together.tokens[2]), drafter
        assert alone.stats[0].guarantee == "exact" and alone.stats[0].faults == 0
    assert together.stats[0].order == "halton" and together.stats[0].rounds < SIDE * SIDE - 1
    for drafter in ("ahead", "jacobi:window=4"):
        method = {"drafter": drafter, "acceptance": "rejection"}
        both = pipe(TEXTS, seed=[1, 9], **method)
        assert torch.equal(pipe(TEXTS[1], seed=9, **method).tokens[0], both.tokens[1])


def test_orders_of_a_call(pipe):
    named = {name: pipe(TEXTS[0], seed=1, order=name).tokens[0] for name in ("raster", "spread", "halton")}
    assert len({tuple(tokens.tolist()) for tokens in named.values()}) == 3
    own = halton(SIDE, SIDE)
    for given in (list(own), torch.tensor(own), np.array(own)):
        assert torch.equal(pipe(TEXTS[0], seed=1, order=given).tokens[0], named["halton"])
    assert torch.equal(pipe(TEXTS[0], seed=1, order=list(range(SIDE * SIDE))).tokens[0], named["raster"])
    for order, message in (([0, 0, 1], "expected each of 0..2 once"), ([1, 0], "expected the 6 * 6 of the image")):
        with raises_line(f"^order: got .*{re.escape(message)}"):
            pipe(TEXTS[0], order=order)
    with pytest.raises(ValueError, match="order: got RejectedRegions, expected raster, spread, halton"):
        pipe(TEXTS[0], order="islands")


def test_guidance_and_temperature(pipe):
    def drawn(**options):
        return tuple(pipe(TEXTS[0], seed=1, output_type="latent", **options).tokens[0].tolist())

    assert pipe.family.default_guidance == 2.0 and drawn() == drawn(guidance_scale=2.0)
    assert len({drawn(), drawn(guidance_scale=1.0), drawn(temperature=0.0), drawn(negative_prompt=TEXTS[1])}) == 4
    assert drawn(negative_prompt="") == drawn() and drawn(temperature=0.0) == drawn(temperature=0.0, drafter="none")
    assert drawn(top_k=1) == drawn(temperature=0.0)
    for name in ("prompt", "negative_prompt"):
        with raises_line(f"^{name}: got 14 words, expected at most 12"):
            pipe(**{"prompt": TEXTS[0], name: " ".join(["red"] * 12)})


def test_callback_codes_in_place(pipe):
    seen = []

    def look(pipeline, number, count, given):
        seen.append((count, given["tokens"].clone(), given["latents"].shape))

    out = pipe(TEXTS[0], seed=1, callback_on_step_end=look, callback_on_step_end_tensor_inputs=["tokens", "latents"])
    count, tokens, shape = seen[0]
    order = list(halton(SIDE, SIDE))
    assert int((tokens >= 0).sum()) == count < SIDE * SIDE and shape == (1, SIDE, SIDE)
    assert sorted((tokens[0] >= 0).nonzero()[:, 0].tolist()) == sorted(order[:count])
    assert torch.equal(seen[-1][1][0], out.tokens[0])
    passes, origins = out.passes[0].flatten(), out.maps[0].flatten()
    assert passes[order[0]] == 0 and [passes[place] for place in order] == sorted(passes)
    assert passes.max() == out.stats[0].rounds and set(origins.tolist()) <= set(range(4))


# --- published weights ------------------------------------------------------------------------------------------------


def test_published_weight_names(tmp_path):
    """LlamaGen's names, and the queries' (RandAR's repository); without them it is a LlamaGen."""
    model = network()
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    assert sum("layers" not in name for name in tensors) == 5 and tensors["pos_instruct_embeddings"].shape == (1, 32)
    save_file(tensors, tmp_path / "randar.safetensors")
    loaded = layouts_llamagen.load_llamagen(tmp_path / "randar.safetensors", grid=4, heads=4)
    assert type(loaded) is RandAR and loaded.config == model.config
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, tensors[name]), name
    del tensors["pos_instruct_embeddings"]
    save_file(tensors, tmp_path / "plain.safetensors")
    assert type(layouts_llamagen.load_llamagen(tmp_path / "plain.safetensors", grid=4, heads=4)) is not RandAR


@torch.no_grad()
def test_published_laws_by_formula(tmp_path):
    """LlamaGen's decoder by hand over class, query, code, query, ...; a query is a learned vector, rotated as a key."""
    tensors = dict(network().state_dict())
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "randar.safetensors")
    model = layouts_llamagen.load_llamagen(tmp_path / "randar.safetensors", grid=4, heads=4)
    order = torch.tensor([9, 3, 0, 14, 7])
    codes, turn = torch.tensor([5, 1, 23, 5, 0]), turn_by_hand(1, 4, 8)
    query = tensors["pos_instruct_embeddings"].view(4, 4, 2)  # heads, pairs of channels
    cosine, sine = turn[1 + order][:, None].unbind(-1)
    even, odd = query.unbind(-1)
    asked = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1).flatten(1)
    first = tensors["cls_embedding.embedding_table.weight"][[3]]
    pairs = torch.stack([asked, tensors["tok_embeddings.weight"][codes]], dim=1).flatten(0, 1)
    at = torch.cat([torch.zeros(1, dtype=torch.long), 1 + order.repeat_interleave(2)])
    expected = gpt_reference(tensors, torch.cat([first, pairs])[None], turn[at], 4, 2)[:, 1::2]
    result = distributions(model, model.prefix(torch.tensor([3])), codes[None], order[None])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


# --- presets, and the included painter --------------------------------------------------------------------------------

SHIPPED = registry.CHECKPOINTS / "painter-any-order" / "config.json"
PRESETS = registry.presets("any order").keys() - registry.presets("codes").keys()
shipped = pytest.mark.skipif(not SHIPPED.is_file(), reason="the any-order painter is not in this checkout")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_equals_plain_decoding(pipe, name):
    preset = registry.preset(name, "any order")
    plain = pipe(TEXTS, seed=2, drafter="none", acceptance="exact", order=preset.order)
    fast = pipe(TEXTS, seed=2, **preset.method)
    for one, two in zip(plain.tokens, fast.tokens):
        assert torch.equal(one, two)
    assert fast.stats[0].faults == 0 and fast.stats[0].rounds <= plain.stats[0].rounds
    assert not preset.drafter.startswith("ahead") or fast.stats[0].rounds < plain.stats[0].rounds
    assert saving.portable_name("order", preset.order) == preset.order and preset.source


# --- the included painter ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def painter():
    return ImagePipeline.from_pretrained("painter-any-order")


@shipped
def test_included_painter_passes(painter):
    """Its files are weights, a card and where they are from; images are those of plain decoding in the order."""
    folder = SHIPPED.parent
    assert {path.name for path in folder.iterdir()} >= {"README.md", "provenance.json", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_size < 12e6
    text = "a photo of a penguin"
    for name in ("assd", "assd-raster"):
        preset = registry.preset(name, "any order")
        plain = painter(text, seed=1, drafter="none", order=preset.order)
        fast = painter(text, seed=1, **preset.method)
        assert torch.equal(plain.tokens[0], fast.tokens[0]) and fast.stats[0].faults == 0
        assert fast.passes[0].max() + 1 < 60 < plain.passes[0].max() + 1 == 64
