"""The continuous painter: its network and strict loading."""

import pytest
import torch
from transformers import LlamaConfig

from tests.tiny_images import included_folder, painter_processor
from visspec.distributions import DenoisingSteps
from visspec.models.continuous.model import ContinuousImageConfig, ContinuousImageModel, Sampler, guide
from visspec.models.vectors.diffusion_head import schedule

TINY = {
    "text": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "head_width": 16, "head_depth": 1, "denoising_steps": 4, "feature": 0,
}  # fmt: skip
SMALL = {
    "block_out_channels": (8, 8, 8, 8), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 1, "latent_channels": 8, "norm_num_groups": 4,
    "mid_block_add_attention": False, "sample_size": 64, "scaling_factor": 1.0,
}  # fmt: skip


def build(autoencoder=None, **sizes):
    """A tiny one of the included painter's words and tokens."""
    config = ContinuousImageConfig.from_pretrained(included_folder("painter-continuous"))
    own = TINY | sizes
    text = config.text_config.to_dict() | own.pop("text") | {"num_key_value_heads": 2, "head_dim": 8}
    return ContinuousImageModel(ContinuousImageConfig(LlamaConfig(**text), 8, 8, autoencoder=autoencoder, **own))


def without_words(tokenizer, ids):
    """The unconditional form: all but bos and image start become padding."""
    begin = tokenizer.convert_tokens_to_ids("<begin_of_image>")
    return torch.where((ids == tokenizer.bos_token_id) | (ids == begin), ids, tokenizer.pad_token_id)


@pytest.fixture(scope="module")
def painter():
    """A tiny one with random weights, those that begin at zero too."""
    torch.manual_seed(0)
    model = build(SMALL).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def prompts(guidance):
    """Ids and mask of two prompts of unequal length."""
    tokenizer = painter_processor("painter-continuous").tokenizer
    texts = ["a photo of a pig", "a photo of a tropical fish on a smooth blue ground"]
    texts = [f"{text}<begin_of_image>" for text in texts]
    ids = tokenizer(texts, padding="max_length", max_length=13, return_tensors="pt")["input_ids"]
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
    processor, begin = painter_processor("painter-continuous"), "<begin_of_image>"
    ids = processor(text=["a photo of a pig"], generation_mode="image", return_tensors="pt")["input_ids"]
    assert ids[0, -1] == processor.tokenizer.convert_tokens_to_ids(begin)
    pictures = painter.pixels(torch.randn(2, 64, 8)).detach()
    assert pictures.shape == (2, 3, 64, 64) and float(pictures.min()) >= 0 and float(pictures.max()) <= 1


def test_a_drafter_draws_no_picture():
    model = build()
    with pytest.raises(ValueError, match="no autoencoder"):
        model.pixels(torch.zeros(1, 64, 8))


def test_a_drafter_reads_the_conditions_that_are_known():
    model = build(feature=16).eval()
    values, index, features = torch.randn(2, 3, 8), torch.arange(3).expand(2, 3), torch.randn(2, 3, 16)
    features[:, 1:] = 0.0
    plain, read = model.embed(values, index), model.embed(values, index, features)
    assert torch.equal(plain[:, 1:], read[:, 1:])
    assert torch.allclose(read[:, 0] - plain[:, 0], model.feature_proj(features[:, 0]), atol=1e-6)


def test_schedule_of_a_painter_is_noisy_to_the_end(painter):
    plan = painter.schedule()
    assert isinstance(plan.steps, DenoisingSteps) and plan.steps.noisy and plan.steps.fixed and len(plan.steps) == 4
