"""A causal model of continuous tokens: a stock Llama over projected vectors, a diffusion head for the next of them.

The tokens are the latents of a picture in raster order, as MAR has them (Li et al., arXiv 2406.11838), here behind a
prompt of words and with a key-value cache. Every input carries the place of the token that follows it.

Shapes: B rows, R = B or 2 B rows of the decoder (with guidance the unconditional ones last), L prompt, T tokens of a
picture, N of them, S steps of the head, d size of a token, C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaModel, PreTrainedConfig

from visspec.io.checkpoint import check_whole
from visspec.models.attention.slot_layers import CACHE
from visspec.models.folders import OwnImageModel
from visspec.models.vectors.diffusion_head import DiffusionHead, Schedule, schedule


class ContinuousImageConfig(PreTrainedConfig):
    """token: numbers of a token; grid: rows and columns of tokens; head_width, head_depth: of the diffusion head;
    denoising_steps: of a token when it is sampled. autoencoder: configuration of an `AutoencoderKL` whose latents are
    the tokens, None for a drafter, which draws none. feature: hidden size of a target whose conditions a drafter reads
    beside tokens, 0 for none.
    """

    model_type = "continuous_image"
    sub_configs = {"text_config": LlamaConfig}  # noqa: RUF012, as transformers declares it

    def __init__(
        self,
        text_config: LlamaConfig | dict[str, Any] | None = None,
        token: int = 8,
        grid: int = 8,
        head_width: int = 256,
        head_depth: int = 6,
        denoising_steps: int = 100,
        autoencoder: dict[str, Any] | None = None,
        feature: int = 0,
        **options: Any,
    ):
        sizes = {"token": token, "grid": grid, "head_width": head_width, "head_depth": head_depth}
        for name, value in sizes.items():
            check_whole(name, value, 1, 1 << 16)
        check_whole("denoising_steps", denoising_steps, 2, 1000)
        check_whole("feature", feature, 0, 1 << 16)
        self.text_config = text_config if isinstance(text_config, LlamaConfig) else LlamaConfig(**(text_config or {}))
        self.token, self.grid, self.head_width, self.head_depth = token, grid, head_width, head_depth
        self.denoising_steps, self.autoencoder, self.feature = denoising_steps, autoencoder, feature
        super().__init__(**options)


class ContinuousImageModel(OwnImageModel):
    """Hidden states of words and tokens, and the distribution of the next token as a chain of the head's steps.

    The head predicts the velocity of the forward process x = signal value + noise eps (Salimans and Ho,
    arXiv 2202.00512), v = signal eps - noise value, so that value = signal x - noise v at every level of noise; from a
    predicted eps the first steps' value would be divided by a signal of almost zero.
    """

    config_class = ContinuousImageConfig
    base_model_prefix = "decoder"
    _supports_sdpa = True

    def __init__(self, config: ContinuousImageConfig):
        super().__init__(config)
        width = config.text_config.hidden_size
        self.decoder = LlamaModel(config.text_config)
        self.z_proj = nn.Linear(config.token, width)
        self.rows, self.columns = nn.Embedding(config.grid, width), nn.Embedding(config.grid, width)
        self.head = DiffusionHead(config.token, width, config.head_width, config.head_depth)
        if config.feature:
            self.feature_proj = nn.Linear(config.feature, width)
        if config.autoencoder is not None:
            self.autoencoder = AutoencoderKL(**config.autoencoder)
        self.post_init()

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return self.config.grid**2

    @property
    def factor(self) -> int:
        """Pixels a side of a token."""
        parts = (self.config.autoencoder or {}).get("block_out_channels", [0])
        return 2 ** (len(parts) - 1)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def places(self, index: Tensor) -> Tensor:
        """Embeddings of the places of tokens number `index`; beyond the picture's end, of its last."""
        index = index.clamp(max=self.tokens - 1)
        side = self.config.grid
        return self.rows(index.div(side, rounding_mode="floor")) + self.columns(index % side)

    def embed_prompt(self, ids_RL: Tensor) -> Tensor:
        """Inputs of prompts (R, L, C), padded on the left; the last position predicts token 0."""
        words = self.decoder.embed_tokens(ids_RL)
        first = self.places(torch.zeros_like(ids_RL[:, -1:]))
        return torch.cat([words[:, :-1], words[:, -1:] + first], dim=1)

    def embed(self, values_BNd: Tensor, index_BN: Tensor, features_BNF: Tensor | None = None) -> Tensor:
        """Inputs of tokens number `index` (B, N, C); the position of token i predicts token i + 1.

        features: for a drafter, the conditions that the tokens were drawn from, the target's or its own, zero where
        they are not known.
        """
        inputs = self.z_proj(values_BNd) + self.places(index_BN + 1)
        if features_BNF is None:
            return inputs
        known = (features_BNF != 0).any(dim=-1, keepdim=True)
        return inputs + self.feature_proj(features_BNF) * known

    def forward(
        self, ids_BL: Tensor, attention_BL: Tensor, values_BTd: Tensor, features_BTF: Tensor | None = None
    ) -> Tensor:
        """Conditions of the head for every token of a picture, (B, T, C), given those before it."""
        index = torch.arange(self.tokens - 1, device=ids_BL.device).expand(len(ids_BL), -1)
        tokens = self.embed(values_BTd[:, :-1], index, None if features_BTF is None else features_BTF[:, :-1])
        inputs = torch.cat([self.embed_prompt(ids_BL), tokens], dim=1)
        mask = torch.cat([attention_BL.bool(), torch.ones_like(index, dtype=torch.bool)], dim=1)
        hidden = self.decoder(inputs_embeds=inputs, attention_mask=mask.long(), use_cache=False).last_hidden_state
        return hidden[:, ids_BL.shape[1] - 1 :]

    def schedule(self) -> Schedule:
        """Steps of a token's chain, with their times and levels."""
        return schedule(self.config.denoising_steps)

    def pixels(self, values_BTd: Tensor) -> Tensor:
        """Pictures (B, 3, height, width) in 0..1 of tokens. Raises ValueError for a drafter."""
        if self.config.autoencoder is None:
            raise ValueError("output_type: got pixels, expected 'latent': the model has no autoencoder")
        latents = values_BTd.transpose(1, 2).unflatten(2, (self.config.grid, -1))
        scale = self.autoencoder.config.scaling_factor
        return (self.autoencoder.decode(latents / scale).sample / 2 + 0.5).clamp(0, 1)


load = ContinuousImageModel.read


def guide(output: Tensor, guidance: float) -> Tensor:
    """(R, ...) outputs of the head as (B, ...): away from the unconditional rows, which are last."""
    if guidance == 1.0:
        return output
    with_words, without = output.chunk(2)
    return torch.lerp(without, with_words, guidance)


class Sampler:
    """The plain loop: one pass of the decoder and S calls of the head for each token, no speculation.

    All that does not depend on a chain's points is computed before it: coefficients once, the modulations of all steps
    in one call for each token.
    """

    def __init__(
        self,
        model: ContinuousImageModel,
        guidance: float = 1.0,
        temperature: float = 1.0,
        steps: int | None = None,
    ):
        self.model, self.guidance = model, guidance
        plan = schedule(model.config.denoising_steps if steps is None else steps)
        weight = model.z_proj.weight
        with torch.inference_mode():
            self.time_S1C = model.head.time_embed(plan.times.to(weight.device))[:, None]
        coefficients, signal, noise = plan.steps.warmer(temperature), plan.signal, plan.noise
        keep, move = coefficients.keep.double(), coefficients.move.double()
        self.sigma_S11 = coefficients.low.double().exp().float().to(weight)[:, None, None]
        self.parts = list(zip((keep + move * signal).tolist(), (-move * noise).tolist()))  # of x, of the velocity

    def chain(self, hidden_RC: Tensor, normal: Tensor) -> Tensor:
        """Tokens (B, d) of conditions, from normal numbers (S + 1, B, d), of which the first is where chains begin."""
        head, x = self.model.head, normal[0]
        modulations = head.modulations(self.time_S1C + head.cond_embed(hidden_RC))
        twice = self.guidance != 1.0
        each = zip(self.parts, (normal[1:] * self.sigma_S11).unbind(0), modulations.unbind(0))
        for (keep, move), noise, own in each:
            velocity = guide(head.run_modulated(torch.cat([x, x]) if twice else x, own), self.guidance)
            x = torch.add(noise, x, alpha=keep).add_(velocity, alpha=move)
        return x

    @torch.inference_mode()
    def __call__(self, ids_RL: Tensor, attention_RL: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Tokens (B, T, d) after prompts, unconditional rows last under guidance."""
        model, size = self.model, self.model.config.token
        copies = 1 if self.guidance == 1.0 else 2
        rows, device = len(ids_RL) // copies, ids_RL.device
        cache, mask, inputs = DynamicCache(), attention_RL.long(), model.embed_prompt(ids_RL)
        values = []
        for t in range(model.tokens):
            hidden = model.decoder(
                inputs_embeds=inputs, attention_mask=mask, use_cache=True, **{CACHE: cache}
            ).last_hidden_state[:, -1]
            normal = torch.randn(len(self.parts) + 1, rows, size, generator=generator, device=device)
            values.append(self.chain(hidden, normal.to(hidden.dtype)))
            inputs = model.embed(values[-1][:, None], torch.full((rows, 1), t, device=device)).repeat(copies, 1, 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return torch.stack(values, dim=1)
