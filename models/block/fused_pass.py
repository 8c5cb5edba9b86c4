"""The pass of a DFlash network with fewer and larger products, for small networks whose cost is kernel launches.

It computes what transformers' module does, with norms folded into the products that follow them, and with one product
each for queries, keys and values, for gate and up, and for the context's keys and values of all layers. Pairs of
rotated channels are moved next to each other, which does not change attention.

Shapes: B rows, C context elements, K block, L layers, H heads, G heads of keys and values, E head size, d hidden size,
F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, MuseGlimmerAssistantModel
from transformers.activations import SiLUActivation
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantDecoderLayer

from visspec.models.block.dflash2 import DFlash2Model, GroupedConv, convolved, kernels

KINDS = (MuseGlimmerAssistantModel, DFlash2Model)
LIMIT = 1 << 25  # maximum numbers in a fused network; larger ones run unchanged, so that no large weight is held twice
FIXED = ("default", "linear", "llama3")  # rotary embeddings whose frequencies are the same in every pass


def foldable(network: nn.Module) -> bool:
    """Whether a network is small, unmodified, from transformers or DFlash 2, and computes what `BlockPass` does."""
    if not isinstance(network, KINDS) or type(network) not in KINDS or any(map(_has_hooks, network.modules())):
        return False
    plain = all(type(m) in (nn.Linear, nn.SiLU, SiLUActivation) for m in _parts(network))
    fixed = network.rotary_emb.rope_type in FIXED
    weights = list(network.parameters())
    alike = len({(w.dtype, w.device) for w in weights}) == 1 and weights[0].is_floating_point()
    return plain and fixed and alike and sum(w.numel() for w in weights) <= LIMIT


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks or an instance's own forward observe or change what a module computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def _parts(network: Any) -> list[nn.Module]:
    """Return the modules whose class must be the expected one."""
    parts = [network.encoder.fc]
    for layer in network.layers:
        own, mlp = layer.self_attn, layer.mlp
        parts += [conv.kernel_projection for conv in layer.children() if isinstance(conv, GroupedConv)]
        parts += [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn]
    return parts


def stamp(network: nn.Module) -> tuple:
    """Return a value that changes when a network's weights are replaced, written to or moved (fused optimizers leave no
    trace). Only the first weight is checked, because checking all takes as long as some of the products.
    """
    first = next(network.parameters())
    return id(network), first.data_ptr(), 0 if first.is_inference() else first._version


class BlockPass:
    """A `foldable` network, fused: a copy of its current weights, called like the network."""

    def __init__(self, network: Any):
        config = network.config
        self.heads, self.shared, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.hidden, self.eps, self.kinds = config.hidden_size, config.rms_norm_eps, list(config.layer_types)
        rotary = network.rotary_emb
        self.frequency_P, self.scaling = rotary.inv_freq.float(), float(rotary.attention_scaling)
        pairs = torch.arange(self.size, device=self.frequency_P.device).view(2, -1).T.flatten()
        self.read = network.encoder.fc.weight.detach().T.contiguous()
        self.layers = [self._fuse_layer(layer, pairs) for layer in network.layers]
        known = network.encoder.output_norm_enc.weight.detach()
        owns = [layer.self_attn for layer in network.layers]
        parts = [torch.cat([_interleave_halves(own.k_proj, pairs), own.v_proj.weight.detach()]) for own in owns]
        self.context = (torch.cat(parts) * known).T.contiguous()  # (d, 2 L G E)
        norms = [own.k_norm.weight.detach()[pairs] for own in owns]
        self.key_norms_LGE = torch.stack(norms)[:, None].expand(-1, self.shared, -1).contiguous()
        self.last = network.norm.weight.detach()

    def _fuse_layer(self, layer: MuseGlimmerAssistantDecoderLayer, pairs: Tensor) -> tuple[Any, ...]:
        own, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat(
            [_interleave_halves(own.q_proj, pairs), _interleave_halves(own.k_proj, pairs), own.v_proj.weight.detach()]
        )
        norms = [own.q_norm.weight.detach()[pairs]] * self.heads + [own.k_norm.weight.detach()[pairs]] * self.shared
        gate_up = torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])
        return (
            (qkv * layer.input_layernorm.weight.detach()).T.contiguous(),
            torch.stack(norms),
            own.o_proj.weight.detach().T.contiguous(),
            (gate_up * layer.post_attention_layernorm.weight.detach()).T.contiguous(),
            mlp.down_proj.weight.detach().T.contiguous(),
            _around(layer, "attention_conv", layer.input_layernorm.weight),
            _around(layer, "mlp_conv", layer.post_attention_layernorm.weight),
        )

    def __call__(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        attention_mask: dict,
        position_ids: Tensor,
        cache: Cache,
    ) -> Tensor:
        """Return hidden states (B, K, d). noise_embeds (B, K, d), context (B, C, F), positions (B, C + K) of both;
        masks by layer type, or None if everything is visible. K may be 0, to read the context for later passes.
        """
        x_BKd, known = noise_embeds, context_hidden_states.shape[1]
        angle_BTP = position_ids[..., None].float() * self.frequency_P
        turn_BTP = torch.polar(angle_BTP.new_full((), self.scaling).expand_as(angle_BTP), angle_BTP)
        if known:
            read_BCd = F.rms_norm(context_hidden_states @ self.read, (self.hidden,), None, self.eps)
            both = (read_BCd @ self.context).unflatten(-1, (len(self.layers), 2, self.shared, self.size))
            keys_BCLGE = F.rms_norm(both[:, :, :, 0], (self.size,), None, self.eps) * self.key_norms_LGE
            keys_BCLGE = rotate_pairs(keys_BCLGE, turn_BTP[:, :known, None])
        for index, (qkv, norms, out, gate_up, down, own, ff) in enumerate(self.layers):
            normed_BKd, after = own(F.rms_norm(x_BKd, (self.hidden,), None, self.eps))
            qkv_BKHE = (normed_BKd @ qkv).unflatten(-1, (self.heads + 2 * self.shared, self.size))
            turning = self.heads + self.shared
            qk_BKHE = F.rms_norm(qkv_BKHE[:, :, :turning], (self.size,), None, self.eps) * norms
            qk_BKHE, value = rotate_pairs(qk_BKHE, turn_BTP[:, known:]), qkv_BKHE[:, :, turning:]
            query, key = qk_BKHE[:, :, : self.heads], qk_BKHE[:, :, self.heads :]
            if known:
                key = torch.cat([keys_BCLGE[:, :, index], key], dim=1)
                value = torch.cat([both[:, :, index, 1], value], dim=1)
            key, value = cache.update(key.transpose(1, 2), value.transpose(1, 2), index)
            if not x_BKd.shape[1]:
                continue
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key,
                value,
                attn_mask=attention_mask[self.kinds[index]],
                enable_gqa=self.heads != self.shared,
            )
            x_BKd = after(x_BKd, mixed.transpose(1, 2).flatten(2) @ out)
            normed_BKd, after = ff(F.rms_norm(x_BKd, (self.hidden,), None, self.eps))
            gate, up = (normed_BKd @ gate_up).chunk(2, dim=-1)
            x_BKd = after(x_BKd, (F.silu(gate) * up) @ down)
        return F.rms_norm(x_BKd, (self.hidden,), self.last, self.eps)


def _around(
    layer: nn.Module, name: str, scale: Tensor
) -> Callable[[Tensor], tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]]:
    """Return a function from a sublayer's unscaled input to its new input and to how its output is added."""
    if (conv := getattr(layer, name, None)) is None:
        return lambda x: (x, torch.add)
    project = (conv.kernel_projection.weight * scale).detach().T.contiguous()
    base_SGE = conv.base_SGE().detach()

    def around(x_BKd: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        first, second = kernels(x_BKd @ project, base_SGE)  # a channel's scale commutes with its kernel
        return convolved(x_BKd, first), lambda onto_BKd, y_BKd: convolved(y_BKd, second, onto_BKd)

    return around


def rotate_pairs(x_BTHE: Tensor, turn_BTP: Tensor) -> Tensor:
    """Rotate pairs of neighboring channels of heads (B, T, ..., E) by (B, T, ..., P), broadcast over the heads."""
    pairs = torch.view_as_complex(x_BTHE.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn_BTP.unsqueeze(-2)).flatten(-2).to(x_BTHE.dtype)


def _interleave_halves(linear: nn.Linear, pairs: Tensor) -> Tensor:
    """Reorder a projection whose heads are rotated in halves, so that the paired channels are next to each other."""
    weight = linear.weight.detach()
    return weight.unflatten(0, (-1, len(pairs)))[:, pairs].flatten(0, 1)
