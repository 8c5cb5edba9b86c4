"""Folder with a RandAR for prompts of words and the VQ model of its codes, in transformers' layout.

Shapes: B prompts, P words of the longest prompt, F features per word.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import JanusVQVAE, JanusVQVAEConfig, PreTrainedConfig

from visspec.models.folders import OwnImageModel
from visspec.models.llamagen.network import LlamaGenConfig, RandAR


class RandARImageConfig(PreTrainedConfig):
    """Configuration of a RandAR model and its codes.

    Args:
        network: Arguments of `LlamaGenConfig`.
        vocab: Number of words.
        words: Length of the longest prompt.
        features: Features of a word.
        vq_config: Configuration of the codes' VQ model.
    """

    model_type = "randar_image"
    sub_configs = {"vq_config": JanusVQVAEConfig}  # noqa: RUF012, as transformers declares it

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        vocab: int = 64,
        words: int = 12,
        features: int = 64,
        vq_config: JanusVQVAEConfig | dict[str, Any] | None = None,
        **options: Any,
    ):
        vq = vq_config if isinstance(vq_config, JanusVQVAEConfig) else JanusVQVAEConfig(**(vq_config or {}))
        self.vq_config = vq
        self.network = {"layers": 1, "heads": 1, "hidden_size": 16} | (network or {})
        self.vocab, self.words, self.features = vocab, words, features
        self.sizes  # noqa: B018, raises for an invalid network
        super().__init__(**options)

    @property
    def sizes(self) -> LlamaGenConfig:
        return LlamaGenConfig(
            **self.network,
            grid=self.vq_config.num_patches,
            condition="caption",
            prefix=self.words,
            caption_width=self.features,
            codes=self.vq_config.num_embeddings,
            prefix_apart=False,
        )


class RandARImageModel(OwnImageModel):
    """`net` generates codes; `vqmodel` (a stock `JanusVQVAE`) converts between them and images."""

    config_class = RandARImageConfig
    base_model_prefix = "net"

    def __init__(self, config: RandARImageConfig):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab, config.features)
        self.columns = nn.Embedding(config.words, config.features)
        self.net = RandAR(config.sizes)
        self.vqmodel = JanusVQVAE(config.vq_config)
        self.post_init()

    @property
    def image_codec(self) -> JanusCodec:
        return JanusCodec(self.vqmodel)

    def features(self, ids_BL: Tensor, real_BL: Tensor, name: str = "prompt") -> tuple[Tensor, Tensor]:
        """Embed left-padded prompts as conditions (B, P, F), zero at padding, with a mask of real words (B, P). Words
        are counted from the end of a prompt. Raises ValueError, about the argument `name`, for more than P words.
        """
        most, longest = self.config.words, int(real_BL.sum(dim=1).max())
        if longest > most:
            raise ValueError(f"{name}: got {longest} words, expected at most {most}.")
        ids_BP, real_BP = (F.pad(part[:, -most:], (most - min(most, part.shape[1]), 0)) for part in (ids_BL, real_BL))
        return (self.words(ids_BP) + self.columns.weight) * real_BP[..., None], real_BP


class JanusCodec:
    """A stock `JanusVQVAE` with the interface of `layouts_vq.ImageCodec`."""

    def __init__(self, model: JanusVQVAE):
        self.model = model

    @property
    def codebook(self) -> Tensor:
        """The vectors that the decoder uses, (K, D), of unit length."""
        return F.normalize(self.model.quantize.embedding.weight.detach(), dim=-1)

    @property
    def factor(self) -> int:
        """Pixels per code, along one side."""
        return 2 ** (len(self.model.config.channel_multiplier) - 1)

    @torch.no_grad()
    def decode(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Decode codes (B, T) in raster order to pixels (B, height, width, 3), float32 in [-1, 1]."""
        return self.model.decode(cast(torch.LongTensor, tokens)).permute(0, 2, 3, 1).float().clamp(-1, 1)
