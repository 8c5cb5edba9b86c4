"""Networks that compress the slots of an image run into a few vectors: those of ViSpec, FLASH and SpecVLM.

Shapes: R image runs, S slots of a run (`real` (R, S) bool: false past the end of a shorter run), Q vectors, H heads,
E head size, d hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from visspec.models.eagle.config import EagleConfig

BRANCHES = ("prune", "pool", "convolution", "resampler")


class ViSpecAdaptor(nn.Module):
    """ViSpec's learned queries (arXiv 2509.15235) over a run: (R, S, d) -> (R, Q, d)."""

    def __init__(self, config: EagleConfig, count: int):
        super().__init__()
        d, self.heads, size = config.hidden, config.heads, config.hidden // config.heads
        self.norm = LlamaRMSNorm(d, config.eps) if config.norm_embedding else nn.Identity()
        # with ViSpec's initial scale, every query starts as the mean of the run; our larger scale keeps them apart
        self.q = nn.Parameter(torch.randn(count, config.heads, size) * (4.0 if config.norm_embedding else size**-0.5))
        self.k_proj = nn.Linear(d, d, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, d, bias=config.qkv_bias)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, image_RSd: Tensor, real_RS: Tensor) -> Tensor:
        x_RSd = self.norm(image_RSd)
        key, value = (f(x_RSd).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        query = self.q.transpose(0, 1).expand(len(image_RSd), -1, -1, -1).to(key.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=real_RS[:, None, None])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FlashQueries(nn.Module):
    """FLASH (arXiv 2505.12728): latents are mixtures of a run's elements with weights softmax(A H^T), unscaled, where H
    are the target's features at the slots.
    """

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(config.image_latents, config.hidden) * config.hidden**-0.5)

    def forward(self, x_RSd: Tensor, feature_RSd: Tensor, real_RS: Tensor, question_Rd: Tensor) -> Tensor:
        """Return latents (R, Q, d): means of the slots' layer inputs `x_RSd`, weighted by the target's features."""
        score_RQS = self.queries @ feature_RSd.transpose(1, 2)
        return score_RQS.masked_fill(~real_RS[:, None], float("-inf")).softmax(dim=-1) @ x_RSd


class SpecVLMBranches(nn.Module):
    """SpecVLM (arXiv 2509.11815): one of four compressions, which a gate chooses from the question. Training uses a
    Gumbel-softmax whose forward pass is one-hot; inference uses the gate's argmax.

    Each branch gives Q vectors here: "prune" picks evenly spaced slots, "pool" averages adjacent ones, "convolution"
    is strided with width 3, and "resampler" uses learned queries.
    """

    def __init__(self, config: EagleConfig):
        super().__init__()
        d, self.count = config.hidden, config.image_latents
        self.gate = nn.Linear(d, len(BRANCHES))
        self.convolution = nn.Conv1d(d, d, 3, padding=1)
        self.resampler = ViSpecAdaptor(config, self.count)

    def forward(self, x_RSd: Tensor, feature_RSd: Tensor, real_RS: Tensor, question_Rd: Tensor) -> Tensor:
        """Return latents (R, Q, d). x: layer inputs of the slots, feature: unused, question: the last feature."""
        x_RSd = x_RSd * real_RS[..., None]
        spaced_RQS, mean_RQS = shares(real_RS, self.count, x_RSd.dtype)
        convolved_RSd = self.convolution(x_RSd.transpose(1, 2)).transpose(1, 2)
        branches = spaced_RQS @ x_RSd, mean_RQS @ x_RSd, spaced_RQS @ convolved_RSd, self.resampler(x_RSd, real_RS)
        score_R4 = self.gate(question_Rd)
        if self.training:
            chosen_R4 = F.gumbel_softmax(score_R4, hard=True)
        else:
            chosen_R4 = F.one_hot(score_R4.argmax(dim=-1), len(BRANCHES)).to(score_R4)
        return torch.einsum("rn,nrqd->rqd", chosen_R4, torch.stack(branches))


def shares(real_RS: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two weight matrices (R, Q, S) that split a run into `count` parts: one selects the middle slot of each
    part, the other averages the part, as `adaptive_avg_pool1d` divides it.
    """
    length_R1 = real_RS.sum(dim=1, keepdim=True)
    place_Q, slot_S = (torch.arange(n, device=real_RS.device) for n in (count, real_RS.shape[1]))
    start_RQ, end_RQ = place_Q * length_R1 // count, -(-(place_Q + 1) * length_R1 // count)
    middle_RQ = (2 * place_Q + 1) * length_R1 // (2 * count)
    inside_RQS = (slot_S >= start_RQ[..., None]) & (slot_S < end_RQ[..., None])
    mean_RQS = inside_RQS.to(dtype) / inside_RQS.sum(dim=-1, keepdim=True)
    return (slot_S == middle_RQ[..., None]).to(dtype), mean_RQS
