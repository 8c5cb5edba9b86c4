"""DFlash 2 (vLLM's pull request 52816; speculators 0.9.0, `dflash2`): DFlash's network with short causal convolutions
around each sublayer. Its head is `sequential.CandidateSelector`.

Tensor names are those of z-lab's and speculators' files: `layers.N.attention_conv.base_kernel` (2, T, d), its
`kernel_projection.weight` (2 T G, d) by side, tap and group, and likewise for `mlp_conv`.

Shapes: B rows, A blocks, M = B A, K places of a block, N = A K, T taps, S = 2 T, G groups of E channels, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantDecoderLayer

CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 16}  # published values


def with_convolutions(
    config: MuseGlimmerAssistantConfig, taps: int | None, group: int | None
) -> MuseGlimmerAssistantConfig:
    """Turn a DFlash configuration into one of DFlash 2. Raises ValueError for sizes that do not fit it."""
    for name, value in zip(CONVOLUTIONS, (taps, group)):
        setattr(config, name, value)
    if config.hidden_size % config.conv_group_size:
        raise ValueError(f"conv_group_size: got {group}, expected a divisor of the hidden size {config.hidden_size}.")
    return config


class GroupedConv(nn.Module):
    """Two causal convolutions over the places of each block, before and after a sublayer. A kernel sums a fixed
    part per channel and a position-dependent part per group of channels: out[i, c] is the sum over taps t of
    (base[t, c] + delta[i, t, g(c)]) x[i - t, c]. Both deltas are computed from the sublayer's normed input.
    """

    def __init__(self, config: MuseGlimmerAssistantConfig):
        super().__init__()
        taps, size = config.conv_kernel_size, config.hidden_size
        self.block, self.groups = config.block_size, size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * self.groups, bias=False)

    def forward(self, x_BNd: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the sublayer's input, and a function to apply to its output."""
        x_MKd = x_BNd.unflatten(1, (x_BNd.shape[1] // self.block, self.block)).flatten(0, 1)
        delta_SMKG = self.kernel_projection(x_MKd).unflatten(-1, (-1, self.groups)).permute(2, 0, 1, 3)
        base_SGE = self.base_kernel.flatten(0, 1).unflatten(-1, (self.groups, -1))
        first, second = (delta_SMKG[..., None] + base_SGE[:, None, None]).flatten(-2).chunk(2)  # (T, M, K, d)
        return convolve(x_MKd, first).view_as(x_BNd), lambda y: convolve(y.reshape(x_MKd.shape), second).view_as(y)


def convolve(x_MKd: Tensor, kernel_TMKd: Tensor) -> Tensor:
    """Convolve blocks (M, K, d)."""
    out = x_MKd * kernel_TMKd[0]
    for tap in range(1, len(kernel_TMKd)):
        out[:, tap:].addcmul_(x_MKd[:, :-tap], kernel_TMKd[tap, :, tap:])
    return out


class Layer(MuseGlimmerAssistantDecoderLayer):
    """A layer of DFlash with convolutions around attention and feed-forward network."""

    def __init__(self, config: MuseGlimmerAssistantConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_conv, self.mlp_conv = GroupedConv(config), GroupedConv(config)

    def forward(self, hidden_states: Tensor, **arguments: object) -> Tensor:
        x, smooth = self.attention_conv(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + smooth(self.self_attn(hidden_states=x, **arguments)[0])
        x, smooth = self.mlp_conv(self.post_attention_layernorm(hidden_states))
        return hidden_states + smooth(self.mlp(x))


class DFlash2Model(MuseGlimmerAssistantModel):
    """DFlash's network with the configuration of `with_convolutions`. Initially the convolutions change nothing."""

    def __init__(self, config: MuseGlimmerAssistantConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedConv):
            nn.init.zeros_(module.kernel_projection.weight)
            nn.init.zeros_(module.base_kernel)
            nn.init.ones_(module.base_kernel[:, 0])
