"""The continuous painter: its network, strict loading, and its recipe on a few steps."""

import argparse
import json

import pytest
import torch

from visspec.distributions import DenoisingSteps
from visspec.models.continuous.model import ContinuousImageModel, Sampler, guide, load
from visspec.models.vectors.diffusion_head import schedule
from visspec.toys.recipes import continuous_autoencoder, continuous_painter
from visspec.toys.recipes.animals import build_processor, build_tokenizer, pictures, prompt_ids
from visspec.toys.recipes.painter_build import without_words
from visspec.toys.recipes.recipe import write_coded

TINY = {
    "text": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "head_width": 16, "head_depth": 1, "denoising_steps": 4, "feature": 0,
}  # fmt: skip
SMALL = continuous_autoencoder.CONFIG | {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}


@pytest.fixture(scope="module")
def painter():
    """A tiny one with random weights, those that begin at zero too."""
    torch.manual_seed(0)
    model = continuous_painter.build("painter", SMALL, TINY).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def prompts(guidance):
    """Ids and mask of two prompts of unequal length."""
    tokenizer = build_tokenizer()
    ids = prompt_ids(tokenizer, ["a photo of a pig", "a photo of a tropical fish on a smooth blue ground"])
    seen = ids != tokenizer.pad_token_id
    if guidance == 1.0:
        return ids, seen
    return torch.cat([ids, without_words(tokenizer, ids)]), seen.repeat(2, 1)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_plain_loop_is_the_chain_written_out(painter, guidance):
    """Cache, precomputed coefficients and modulations against one whole pass a token and DDPM's posterior."""
    ids, seen = prompts(guidance)
    drawn = Sampler(painter, guidance)(ids, seen, torch.Generator().manual_seed(3))
    normals = torch.Generator().manual_seed(3)
    plan, values = schedule(4), torch.zeros(2, painter.tokens, 8)
    with torch.inference_mode():
        for t in range(6):
            copies = len(ids) // 2
            hidden = painter(ids, seen, values.repeat(copies, 1, 1))[:, t]
            x, *noises = torch.randn(5, 2, 8, generator=normals)
            for i, noise in enumerate(noises):
                time = plan.times[i].expand(len(ids))
                velocity = guide(painter.head(x.repeat(copies, 1), time, hidden), guidance)
                value = plan.signal[i].float() * x - plan.noise[i].float() * velocity
                x = plan.steps.keep[i] * x + plan.steps.move[i] * value + plan.steps.low[i].exp() * noise
            values[:, t] = x
    assert torch.allclose(drawn[:, :6], values[:, :6], atol=2e-4)
    assert drawn.shape == (2, 64, 8)


def test_temperature_scales_the_noise_of_every_step(painter):
    cold, warm = (Sampler(painter, 1.0, t) for t in (0.5, 1.0))
    assert cold.parts == warm.parts
    assert torch.allclose(2 * cold.sigma_S11, warm.sigma_S11)


def test_an_input_carries_the_place_of_the_next_token(painter):
    values, index = torch.randn(1, 1, 8), torch.tensor([[0, 7, 63]])
    step = painter.embed(values.expand(1, 3, 8), index) - painter.z_proj(values)
    rows, columns = painter.rows.weight, painter.columns.weight
    assert torch.allclose(step[0], torch.stack([rows[0] + columns[1], rows[1] + columns[0], rows[7] + columns[7]]))


def test_the_model_and_its_processor_agree_on_where_an_image_begins(painter):
    processor, begin = build_processor(side=64), "<begin_of_image>"
    ids = processor(text=["a photo of a pig"], generation_mode="image", return_tensors="pt")["input_ids"]
    assert ids[0, -1] == processor.tokenizer.convert_tokens_to_ids(begin)
    settings = continuous_painter.generation_config(1.5)
    assert settings.guidance_scale == 1.5
    assert settings.generation_kwargs["boi_token_id"] == processor.tokenizer.get_vocab()[begin]
    pictures = painter.pixels(torch.randn(2, 64, 8)).detach()
    assert pictures.shape == (2, 3, 64, 64) and float(pictures.min()) >= 0 and float(pictures.max()) <= 1


def test_a_drafter_draws_no_picture():
    model = continuous_painter.build("drafter", sizes=TINY)
    with pytest.raises(ValueError, match="no autoencoder"):
        model.pixels(torch.zeros(1, 64, 8))


def test_a_drafter_reads_the_conditions_that_are_known():
    model = continuous_painter.build("drafter", sizes=TINY | {"feature": 16}).eval()
    values, index, features = torch.randn(2, 3, 8), torch.arange(3).expand(2, 3), torch.randn(2, 3, 16)
    features[:, 1:] = 0.0
    plain, read = model.embed(values, index), model.embed(values, index, features)
    assert torch.equal(plain[:, 1:], read[:, 1:])
    assert torch.allclose(read[:, 0] - plain[:, 0], model.feature_proj(features[:, 0]), atol=1e-6)


def test_a_fresh_drafter_has_the_painters_head_and_embeddings(painter):
    model = continuous_painter.drafter_of(painter, TINY | {"feature": 16}).eval()
    ids, _ = prompts(1.0)
    assert torch.equal(model.embed_prompt(ids), painter.embed_prompt(ids))
    x, t, condition = torch.randn(3, 8), torch.tensor([5, 500, 999]), torch.randn(3, 16)
    assert torch.equal(model.head(x, t, condition), painter.head(x, t, condition))
    values = torch.randn(2, 3, 8)
    index, features = torch.arange(3).expand(2, 3), torch.randn(2, 3, 16)
    read = model.embed(values, index, features) - model.embed(values, index)
    assert torch.allclose(read, features, atol=1e-6)


def test_settled_autoencoder_gives_tokens_of_deviation_one(monkeypatch):
    """Folded into the weights: mean 0 and deviation 1 of sampled tokens, a posterior of one deviation everywhere, and
    the picture that the decoder was trained to make.
    """
    monkeypatch.setattr(continuous_autoencoder, "CONFIG", SMALL)
    trained = continuous_autoencoder.AutoencoderKL(**SMALL).eval()
    model = continuous_autoencoder.normalize_latents(trained, count=64)
    first = continuous_autoencoder.FIRST["tokens"]
    shown = pictures(range(first - 64, first))
    with torch.no_grad():
        posterior = model.encode(shown).latent_dist
        variance = posterior.mean.var((0, 2, 3)) + posterior.var.mean((0, 2, 3))
        assert torch.allclose(posterior.mean.mean((0, 2, 3)), torch.zeros(8), atol=1e-4)
        assert torch.allclose(variance, torch.ones(8), atol=1e-3)
        assert torch.allclose(posterior.std, posterior.std[:1, :, :1, :1].expand_as(posterior.std))
        own = continuous_autoencoder.moments(trained, shown)
        normalised = (own - own.mean((0, 2, 3), keepdim=True)) / own.std((0, 2, 3), keepdim=True)
        wanted = trained.decoder(trained.post_quant_conv(normalised))
        assert torch.allclose(model.decode(posterior.mean).sample, wanted, atol=1e-3)


@pytest.mark.slow
def test_recipe_writes_both_folders(tmp_path, monkeypatch):
    for module in (continuous_autoencoder, continuous_painter):
        monkeypatch.setattr(module, "CONFIG", SMALL)
    for name in ("painter", "drafter"):
        monkeypatch.setitem(continuous_painter.SIZES, name, TINY | {"feature": 16 if name == "drafter" else 0})
    monkeypatch.setattr(continuous_painter, "GUIDANCES", (1.0, 2.0))
    options: argparse.Namespace = continuous_painter.PAINTER.parse(
        ["--out", str(tmp_path), "--pairs", "8", "--rows", "4", "--steps", "3", "--drafter-steps", "2", "--every", "9",
         "--autoencoder-steps", "2", "--every-prompt", "48"]
    )  # fmt: skip
    continuous_autoencoder.AutoencoderStage(options, 0).run()
    write_coded(continuous_autoencoder.coders, options)
    continuous_painter.ContinuousStage(options, 0).run()
    continuous_painter.ContinuousDraftStage(options, 0).run()
    continuous_painter.finish(options)
    for name in continuous_painter.NAMES.values():
        assert isinstance(load(tmp_path / name), ContinuousImageModel)
        assert json.loads((tmp_path / name / "provenance.json").read_text())["compute_dtype"] == "float32"
    assert "{" not in (tmp_path / "painter-continuous" / "README.md").read_text()


def test_schedule_of_a_painter_is_noisy_to_the_end(painter):
    plan = painter.schedule()
    assert isinstance(plan.steps, DenoisingSteps) and plan.steps.noisy and plan.steps.fixed and len(plan.steps) == 4
