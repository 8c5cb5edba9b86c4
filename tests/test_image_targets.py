"""Image families: the law of stock `generate`, or of a plain loop over the backbone. B rows, T positions, V ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests import tiny_images as tiny
from tests.doubles import drafted, raises_line
from tests.image_cases import CASES, TEXTS, Case, draw, expected, llamagen_model, made, named
from visspec import tree as trees
from visspec.api.images.pipeline import ImagePipeline
from visspec.cli import bench_image
from visspec.models.codecs.vq_layout import ImageCodec, VQModel
from visspec.models.image_codes.family import ImageLayout, family_of
from visspec.models.image_codes.target import ImageAR
from visspec.models.jacobi.drafter import Jacobi
from visspec.types import FREE, Drafter, DrafterTraits, Request, Sampling


@pytest.fixture(params=CASES)
def name(request):
    return request.param


# --- greedy identity, sampling, trees -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[0], [0, 1, 2]], ids=["one", "ragged"])
@pytest.mark.parametrize("window", [0, 6])
def test_greedy_is_what_the_reference_draws(name, rows, window):
    case = made(name)
    result, state = draw(case, rows, Jacobi(window) if window else None)
    assert result == [expected(name, row) for row in rows]
    assert len({tuple(row) for row in result}) == len(rows)  # the prompts count
    if window:
        assert any("drafted" in origin for origin in state.trace.origin)


@pytest.mark.parametrize("name, guidance", [("emu3", 1.0), ("emu3", 3.0), ("glm_image", 1.0)])
def test_stock_arm_equals_loop(name, guidance):
    family, _ = named(name)
    layout, sampling = family.layout(), Sampling(temperature=0.0, guidance=guidance)
    case = Case(family, layout, guidance, lambda rows: family.prompt([TEXTS[r] for r in rows], guidance != 1.0), None)
    result = family.stock([TEXTS[0]], sampling, layout)
    assert result.tolist() == draw(case, [0])[0]
    torch.manual_seed(0)
    sampled = family.stock(TEXTS[:2], replace(sampling, temperature=1.0, top_k=5), layout)
    assert sampled.shape == (2, layout.positions) and sampled[:, layout.free].max() < family.codes
    assert (sampled == layout.fixed)[:, layout.fixed != FREE].all()


@pytest.mark.parametrize("name", ["emu3", "llamagen-class"])
def test_the_bench_knows_every_family(name):
    family, pipe = named(name)
    if not family.no_pixels:  # none of these tiny models has a pixel decoder of its size
        family.no_pixels = "not here"
    texts = ["1", "2"] if name == "llamagen-class" else TEXTS[:2]
    record = bench_image.bench(pipe, texts, {"window": "jacobi:window=4/exact"}, {"temperature": 1.0}, warmup=0)
    assert [row["name"] for row in record["rows"]] == ["plain", "window"] and not record["failures"]
    assert record["rows"][1]["identical"] == len(texts)
    assert (record["stock"] is None) == (name == "llamagen-class")
    assert ("over plain" in bench_image.view(record).title) == (name == "llamagen-class")


@pytest.mark.parametrize("name", [n for n in CASES if n != "glm_image"])
def test_guidance_counts(name):
    case = made(name)
    weak = replace(case, guidance=1.5)
    assert draw(weak, [0])[0] != draw(case, [0])[0]


def test_sampled_image_alone_and_in_batch(name):
    case = made(name)
    together, _ = draw(case, [0, 1, 2], Jacobi(5, "maximal"), "rejection", 1.0)
    for row in range(3):
        assert draw(case, [row], Jacobi(5, "maximal"), "rejection", 1.0)[0] == [together[row]]


@pytest.mark.parametrize("start", ["left", "random"])
def test_coupled_windows_equal_plain(name, start):
    case = made(name)
    plain, _ = draw(case, [0, 1, 2], None, "exact", 1.0)
    assert draw(case, [0, 1, 2], Jacobi(6, "gumbel", start), "exact", 1.0)[0] == plain
    assert all(codes_stand(row, case) for row in plain)


def codes_stand(tokens: list[int], case: Case) -> bool:
    return all(
        token == fixed if fixed != FREE else token < case.family.codes
        for token, fixed in zip(tokens, case.layout.fixed.tolist(), strict=True)
    )


@torch.no_grad()
def test_a_tree_is_each_of_its_paths(name):
    case = made(name)
    target, prompt = ImageAR(case.family), case.prompt([0, 1])
    sampling = Sampling(guidance=case.guidance)

    def opened():
        request = Request(prompt, prompt.ids, case.layout.positions, sampling)
        state, _ = target.prefill(request)
        state.output.tokens = [[3], [5]]
        state.pending, state.position = torch.tensor([3, 5]), state.position + 1
        return state

    tree = trees.static((-1, 0, 0, 1, 1, 2, 3))
    tokens = torch.tensor([[3, 1, 2, 4, 7, 6, 9], [5, 8, 0, 2, 3, 4, 1]])
    scores = target.verify(opened(), drafted(tokens, tree)).distribution.logits
    for node, path in enumerate(trees.paths(tree)[0].tolist()):
        path = [n for n in path if n >= 0]
        alone = target.verify(opened(), drafted(tokens[:, path], trees.chain(len(path) - 1))).distribution.logits[:, -1]
        codes = slice(0, case.family.codes)
        torch.testing.assert_close(scores[:, node, codes], alone[:, codes], rtol=1e-4, atol=1e-4)
        assert bool(scores[:, node, case.family.codes :].isneginf().all())


# --- grammar --------------------------------------------------------------------------------------------------------


class Proposes(Drafter):
    """A drafter that proposes what a function of the position in the image says."""

    def __init__(self, token: Callable[[int, int], int], levels: int = 6):
        self.token, self.traits = token, DrafterTraits(levels=levels)

    def propose(self, state, depth):
        ahead = [
            [self.token(row, len(state.tokens[row]) + i) for i in range(depth)] for row in state.rows
        ]  # what follows the newest token, which is pending
        return trees.chain_draft(state.pending, torch.tensor(ahead))


GRAMMATICAL = [name for name in CASES if name in ("emu3", "glm_image", "lumina")]


@pytest.mark.parametrize("name", GRAMMATICAL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_ends_stand_whatever_is_proposed(name, temperature):
    case = made(name)
    vocab = case.family.codes + case.family.grammar
    plain, _ = draw(case, [0, 1, 2], None, "exact", temperature)
    for junk in (lambda row, at: vocab - 1, lambda row, at: (7 * row + 5 * at) % vocab):
        result, _ = draw(case, [0, 1, 2], Proposes(junk), "exact", temperature)
        assert result == plain and all(codes_stand(row, case) for row in result)


@pytest.mark.parametrize("name", GRAMMATICAL)
@pytest.mark.parametrize("grammar", [False, True], ids=["any-code", "its-id"])
def test_row_ends_never_cut_a_draft(name, grammar):
    case = made(name)
    known, last = expected(name, 0), case.layout.positions - 1
    largest = case.family.codes + (case.family.grammar if grammar else 0) - 1
    right = Proposes(lambda row, at: min(known[min(at, last)], largest))
    result, state = draw(case, [0], right)
    assert result == [known]
    assert len(state.trace.rounds) == -(-(case.layout.positions - 1) // (right.traits.levels + 1))


# --- prompts and pixels -------------------------------------------------------------------------------------------


def test_emu3_prompts():
    case = made("emu3")
    names = {i: n for n, i in case.family.model.config.vocabulary_map.items()}
    prompt = case.prompt([0, 1])
    lines = [[names[i] for i in row[seen].tolist()] for row, seen in zip(prompt.ids, prompt.attention)]
    assert lines == [["<s>", "a", "red", "cube", "<boi>", "4*3", "<wrap>"], ["<s>", "blue", "<boi>", "4*3", "<wrap>"]]
    counts = prompt.attention.sum(1)
    assert counts.tolist() == [7, 5, 6, 6]
    assert prompt.positions[:, prompt.attention.shape[1]].tolist() == counts.tolist()


def test_emu3_pixels():
    case = made("emu3")
    result = torch.tensor([expected("emu3", 0)])
    ids = case.family.vocabulary.ids[result]
    stock = case.family.model.decode_image_tokens(image_tokens=ids, height=4, width=3)
    pixels = case.family.pixels(result[:, case.layout.free], case.layout)
    assert pixels.shape == (1, 3, 8, 6) and 0 <= pixels.min() <= pixels.max() <= 1
    assert len(ImageAR(case.family).capabilities.codebook) == case.family.codes, "relaxed rules find neighbours in it"
    options = case.family.processor.image_processor
    mean, std = (torch.tensor(x)[:, None, None] for x in (options.image_mean, options.image_std))
    torch.testing.assert_close(pixels, (stock * std + mean).clamp(0, 1))


def test_glm_image_prompts():
    processor = tiny.glm_processor()
    family = family_of(tiny.glm_image(), processor)
    for height, width in ((64, 96), (1024, 1024), (1152, 768), (512, 2048)):
        layout = family.layout(height, width)
        rows, columns, *preview = processor._get_target_shape(height, width)
        assert layout.grid == (rows, columns) and layout.preview == preview[0] * preview[1]
        assert layout.positions == rows * columns + layout.preview + 1 and len(layout.free) == rows * columns
    prompt = family.prompt(TEXTS[:2], False)
    batch = processor(text=TEXTS[:2], padding=True, return_tensors="pt")
    assert prompt.ids.equal(batch["input_ids"]) and prompt.attention.equal(batch["attention_mask"].bool())
    assert prompt.positions.shape == (3, 2, prompt.ids.shape[1] + family.layout().positions)


def test_glm_image_restores_model():
    case = made("glm_image")
    model = case.family.model.model
    model._cached_decode_position_ids, model._prefill_len = "kept", 7
    try:
        case.prompt([0])
        assert (model._cached_decode_position_ids, model._prefill_len) == ("kept", 7)
    finally:
        model._cached_decode_position_ids = model._prefill_len = None


def test_glm_image_pixels(tmp_path):
    whole = tiny.glm_diffusion()
    draws = {"height": 64, "width": 96, "drafter": "ngram", "seed": [3, 4], "guidance_scale": 1.0}
    parts = {"diffusion": partial(whole, num_inference_steps=2)}
    pipe = ImagePipeline(whole.vision_language_encoder, whole.processor, parts=parts)
    pipe.set_progress_bar_config(disable=True)
    texts = ["a 'red' cube", "blue grass"]
    images, codes = (pipe(texts, output_type=kind, **draws).images for kind in ("pt", "latent"))
    for text, seed, image, code in zip(texts, (3, 4), images, codes):
        drawn = {"prior_token_ids": whole._upsample_token_ids(code, 2, 3), "num_inference_steps": 2}
        generator = torch.Generator().manual_seed(seed)
        stock = whole(text, **drawn, height=64, width=96, generator=generator, output_type="pt")
        assert image.shape == (3, 64, 96) and image.equal(stock.images[0])
    assert not images[0].equal(images[1])
    whole.save_pretrained(tmp_path)
    loaded = ImagePipeline.from_pretrained(str(tmp_path), drafter="ngram")
    loaded.parts["diffusion"].set_progress_bar_config(disable=True)
    assert loaded("blue grass", seed=4, height=64, width=96, output_type="latent").images[0].equal(codes[1])
    assert loaded("blue grass", seed=4, height=64, width=64).images[0].size == (64, 64)


def test_glm_image_pipeline_check(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match="model: got diffusers' FluxPipeline, expected GlmImagePipeline"):
        ImagePipeline.from_pretrained(str(tmp_path))
    (tmp_path / "vae").symlink_to("/")
    with pytest.raises(ValueError, match="refers to 'vae', expected a file inside the folder"):
        ImagePipeline.from_pretrained(str(tmp_path))


def test_chameleon_prompt_style():
    model, names = tiny.chameleon(), {i: n for n, i in tiny.chameleon().config.vocabulary_map.items()}
    sized = ["<racm3:break>", "<reserved08802>", "<reserved08803>"]
    for style, head, bare in (("anole", sized[:1], ["<s>", *sized[:1]]), ("lumina", sized, sized)):
        family = family_of(model, tiny.ChameleonTexts(), style=style)
        layout = family.layout(64, 96) if style == "lumina" else family.layout()
        prompt = family.prompt(["red cube"], True, layout)
        given = [names[i] for i in prompt.ids[0].tolist()]
        assert given[0] == "<s>" and given[-len(head) - 3 :] == ["red", "cube", "<reserved08706>", *head]
        embeds = prompt.embeds[1, prompt.attention[1]]
        ids = torch.tensor([model.config.vocabulary_map[n] for n in bare])
        assert embeds.equal(model.get_input_embeddings()(ids))


def test_codes_become_pixels_through_a_codec():
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [32, 32], "latent_channels": 8, "num_vq_embeddings": tiny.CODES, "vq_embed_dim": 8}
    codec = ImageCodec(VQModel(**blocks, **sizes))
    codec.to = (moved := []).append
    for family in (
        family_of(tiny.chameleon(), tiny.ChameleonTexts(), codec=codec),
        family_of(llamagen_model("class"), None, codec=codec),
    ):
        layout, tokens = ImageLayout.plain(4, 4), torch.arange(16)[None]
        pixels = family.pixels(tokens, layout)
        expected = codec.decode(tokens, (4, 4)).permute(0, 3, 1, 2)
        assert pixels.shape == (1, 3, 8, 8) and not family.no_pixels
        torch.testing.assert_close(2 * pixels - 1, expected)
    assert moved == [torch.device("cpu")] * 2, "to the model's device"
    assert ImageCodec(codec.model).to("meta").model.device.type == "meta"


# --- what is refused, before any pass -----------------------------------------------------------------------------


def test_refusals_name_argument():
    glm, emu3, anole = (made(n) for n in ("glm_image", "emu3", "anole"))
    lumina = family_of(tiny.chameleon(), tiny.ChameleonTexts(), style="lumina")
    classes = family_of(llamagen_model("class"), None)
    captions = family_of(llamagen_model("caption"), None)
    long, emu = ImageLayout.plain(40, 40), tiny.emu3_processor()
    other = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    latent, sizes = "output_type: got pixels, expected 'latent': ", "height, width: got "
    refused = {
        "guidance_scale: got 3.0": lambda: glm.family.check(glm.prompt([0]), glm.layout, 3.0),
        latent + "the codes of GLM-Image": lambda: glm.family.pixels(torch.zeros(1, 12), glm.layout),
        latent + "transformers has no decoder": lambda: anole.family.pixels(torch.zeros(1, 12), anole.layout),
        latent + "no codec": lambda: classes.pixels(torch.zeros(1, 16), classes.layout()),
        "prompt: got ": lambda: emu3.family.check(emu3.prompt([0]), long, 3.0),
        sizes + "9 x 6, expected multiples of 2": lambda: emu3.family.layout(9, 6),
        sizes + "64 x 50, expected multiples of 32": lambda: glm.family.layout(64, 50),
        sizes + "8224 x 32": lambda: glm.family.layout(8224, 32),
        sizes + "256 x 512, expected 512 x 512": lambda: anole.family.layout(256),
        sizes + "768 x 700, expected multiples of 32": lambda: lumina.layout(768, 700),
        sizes + "128 x None, expected 64 x 64": lambda: classes.layout(128),
        sizes + "8 x None, expected 32 x 32": lambda: made("janus").family.layout(8),
        "prompt: got 'a cube', expected a class number 0..9": lambda: classes.prompt(["3", "a cube"], True),
        "prompt: got '10'": lambda: classes.prompt(["10"], True),
        "processor: got None": lambda: captions.prompt(["a cube"], True),
        "style: got 'meta', expected one of anole, lumina": lambda: family_of(
            tiny.chameleon(), tiny.ChameleonTexts(), style="meta"
        ),
        "codec: models of type 'emu3' do not take it": lambda: family_of(tiny.emu3(), emu, codec=object()),
        "model: type 'llama' does not generate images; `visspec list families` shows": lambda: family_of(other, None),
    }
    for start, call in refused.items():
        with raises_line("^" + re.escape(start)):
            call()


# --- encoders -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["janus", "anole", "emu3", "llamagen-class"])
def test_encoder_of_the_model(name):
    family, pixels = made(name).family, torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    if name in ("emu3", "llamagen-class"):
        with pytest.raises(ValueError, match=f"image: got pixels, expected none: {family.name} has no VQ encoder"):
            family.encode(pixels)
        return
    codes = family.encode(pixels)
    expected = family.model.model.vqmodel.encode(2 * pixels - 1).image_tokens
    assert codes.dim() == 2 and codes.dtype == torch.long and torch.equal(codes.flatten(), expected.flatten())
