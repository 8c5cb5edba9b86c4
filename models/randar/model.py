"""RandAR behind a prompt of words, with the VQ model of its codes in one folder, as transformers writes folders.

Shapes: B prompts, P words of the longest prompt, F features of a word.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import JanusVQVAE, JanusVQVAEConfig, PreTrainedConfig

from visspec.models.folders import OwnImageModel
from visspec.models.llamagen.network import LlamaGenConfig
from visspec.models.llamagen.randar import RandAR


class RandARImageConfig(PreTrainedConfig):
    """network: layers, heads, hidden_size and more, as in `LlamaGenConfig`. vocab: words; words: of the longest
    prompt; features: of a word. vq_config: of the codes.
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
        given = vq_config if isinstance(vq_config, JanusVQVAEConfig) else JanusVQVAEConfig(**(vq_config or {}))
        self.vq_config = given
        self.network = {"layers": 1, "heads": 1, "hidden_size": 16} | (network or {})
        self.vocab, self.words, self.features = vocab, words, features
        self.sizes  # noqa: B018, refuses what is no network
        super().__init__(**options)

    @property
    def sizes(self) -> LlamaGenConfig:
        """The network's."""
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
    """`net` draws codes, `vqmodel` (a stock `JanusVQVAE`) turns them into pictures and back."""

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

    def features(self, ids_BL: Tensor, real_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Prompts padded on the left -> the condition (B, P, F), zero at padding, and which of it is real (B, P). Words
        are counted from the end of a prompt. Raises ValueError for prompts of more than P words.
        """
        most, longest = self.config.words, int(real_BL.sum(dim=1).max())
        if longest > most:
            raise ValueError(f"prompt: got {longest} words, expected at most {most}")
        ids_BP, real_BP = (F.pad(part[:, -most:], (most - min(most, part.shape[1]), 0)) for part in (ids_BL, real_BL))
        return (self.words(ids_BP) + self.columns.weight) * real_BP[..., None], real_BP


class JanusCodec:
    """A stock `JanusVQVAE` as `vqgan.ImageCodec` shows others."""

    def __init__(self, model: JanusVQVAE):
        self.model = model

    @property
    def codebook(self) -> Tensor:
        """(K, D): the vectors used by the decoder, of unit length."""
        return F.normalize(self.model.quantize.embedding.weight.detach(), dim=-1)

    @property
    def factor(self) -> int:
        """Pixels per code, along a side."""
        return 2 ** (len(self.model.config.channel_multiplier) - 1)

    @torch.no_grad()
    def decode(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Codes (B, T) in raster order -> pixels (B, height, width, 3), float32 in [-1, 1]."""
        return self.model.decode(cast(torch.LongTensor, tokens)).permute(0, 2, 3, 1).float().clamp(-1, 1)


load = RandARImageModel.read
