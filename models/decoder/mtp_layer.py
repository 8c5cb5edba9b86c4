"""The layer that predicts a further token, from the target's own files; transformers drops it on loading.

x_i = block(fc([norm(e_{i+1}), norm(h_i)])), normed. The target's head maps it to token i + 2, and the same layer reads
it as h_{i+1} for the token after that. e: the target's input embeddings, h: its last hidden states, after the final
norm, block: a decoder layer of the target's class. There are two naming layouts: Qwen3.5 and Exaone 4.5 (`mtp.*`), and
GLM-OCR, whose layer is numbered after the target's. Embeddings and head are the target's; copies of them are ignored.

Shapes: B rows, C elements, S slots, d hidden size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from visspec.io import hub
from visspec.io.checkpoint import check_shapes, load_strictly, read_shapes, read_tensors
from visspec.models.decoder.target import describe

Shapes = dict[str, tuple[int, ...]]
QWEN = r"(?:model\.)?mtp\."
GLM = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
COPIES = {"embed_tokens.weight", "shared_head.head.weight"}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FIRST = "exaone4"  # counts this layer as its first, which may slide; in other models it has full attention


class MtpLayer(nn.Module):
    """The layer of a loaded model, on `meta`, with Qwen3.5's names."""

    repeats = True  # one layer for all levels

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        decoder, self.config = model.get_decoder(), config_of(model)
        size, norm = self.config.hidden_size, type(decoder.norm)
        with torch.device("meta"):
            self.fc = nn.Linear(2 * size, size, bias=False)
            self.layers = nn.ModuleList([type(decoder.layers[0])(self.config, 0)])
            norms = [norm(size, eps=self.config.rms_norm_eps) for _ in range(3)]
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self._shared = model.get_input_embeddings(), model.get_output_embeddings(), decoder.rotary_emb  # no submodules

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self._shared[0](ids)

    def _project_to_logits(self, hidden: Tensor) -> Tensor:
        return self._shared[1](hidden)

    def forward_layer(
        self,
        level: int,
        hidden_BCd: Tensor,
        positions: Tensor,
        cache: Cache,
        *,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """Return normed hidden states (B, C, d).

        Args:
            positions: (B, C), or (3, B, C) with M-RoPE.
            mask: (B, 1, C, S).
        """
        both = self.pre_fc_norm_embedding(inputs_embeds), self.pre_fc_norm_hidden(hidden_BCd)
        x_BCd = self.fc(torch.cat(both, dim=-1))
        rope = self._shared[2](x_BCd, positions)
        x_BCd = self.layers[0](x_BCd, attention_mask=attention_mask, position_embeddings=rope, cache=cache)
        return self.norm(x_BCd)


def config_of(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of a decoder with only this layer. Raises ValueError if the target has no such layer."""
    config = copy.deepcopy(model.config.get_text_config())
    kinds = getattr(config, "layer_types", None)
    if kinds:
        kind = kinds[0] if config.model_type.startswith(FIRST) else "full_attention"
        if kind not in kinds:
            raise ValueError(f"drafter: {type(model).__name__} only has {kinds[0]}, expected a layer of {kind}.")
        config.layer_types = [kind]
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError("drafter: got mtp_use_dedicated_embeddings=True, expected a layer on the model's embeddings.")
    config.num_hidden_layers = 1
    return config


def folder_of(model: PreTrainedModel) -> Path | None:
    """Return the folder that a model was read from, if it is on this machine. Nothing is downloaded."""
    name = getattr(model.config, "name_or_path", None)
    if not name:
        return None
    folder = hub.cached_folder(name, getattr(model.config, "_commit_hash", None)) if hub.names(name) else Path(name)
    return folder if folder is not None and folder.is_dir() else None


def layer_names(names: Iterable[str], layers: int) -> dict[str, str]:
    """Map the names of this layer's tensors in a model's file to ours.

    Args:
        layers: Number of the target's layers.
    """
    patterns = QWEN, rf"(?:.*\.)?layers\.{layers}\."
    for pattern in patterns:
        names_here = {name: match.string[match.end() :] for name in names if (match := re.match(pattern, name))}
        if pattern == QWEN and names_here:
            return names_here
        if any(name.startswith("eh_proj.") for name in names_here.values()):
            return {name: _own_name(short) for name, short in names_here.items() if short not in COPIES}
    return {}


def _own_name(short: str) -> str:
    module, _, end = short.rpartition(".")
    return f"{GLM[module]}.{end}" if module in GLM else f"layers.0.{short}"


def in_files(model: PreTrainedModel) -> bool:
    """Return whether the folder of a loaded model has such a layer that `drafter="mtp"` reads, judged by the headers of
    its files. Nothing is downloaded.
    """
    try:  # layers that the configuration names are read by transformers
        named = getattr(model.config.get_text_config(), "num_mtp_layers", None)
        (_find_layer if named else _check_layer)(model)
        return True
    except (ValueError, OSError, AttributeError):
        return False


def _find_layer(model: PreTrainedModel) -> tuple[Path, dict[str, str], Shapes]:
    """Return the folder, the names of the layer's tensors with ours, and all shapes. Raises ValueError for none."""
    folder = folder_of(model)
    if folder is None:
        raise ValueError(f"drafter: {type(model).__name__} was not read from a folder on this machine, expected one.")
    shapes = read_shapes(folder)
    own = layer_names(shapes, model.config.get_text_config().num_hidden_layers)
    if not own:
        raise ValueError(f"drafter: {folder} has no tensors of an MTP layer (mtp.*). Use the full checkpoint.")
    return folder, own, shapes


def _check_layer(model: PreTrainedModel) -> tuple[Path, dict[str, str], MtpLayer]:
    """Return the folder, the names, and the layer on `meta`. Raises ValueError unless names and shapes match."""
    describe(model)
    folder, own, shapes = _find_layer(model)
    try:
        layer = MtpLayer(model)
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"drafter: the decoder layer of {type(model).__name__} can't be built ({error}).") from error
    fused = _fuse_experts({ours: torch.empty(shapes[name], device="meta") for name, ours in own.items()})
    check_shapes(layer, {name: tuple(t.shape) for name, t in fused.items()}, folder, _file_names(own))
    return folder, own, layer


def _file_names(own: dict[str, str]) -> Callable[[str], str]:
    """Return a function from our tensor names to the file's."""
    theirs = {ours: name for name, ours in own.items()}
    return lambda name: theirs.get(name, f"mtp.{name}")


def load_layer(model: PreTrainedModel) -> MtpLayer:
    """Load the layer of a loaded model from the safetensors in its folder, on the model's device and in its dtype.

    Raises ValueError if there is none, or if tensors are missing, left over or of other shapes.
    """
    folder, own, layer = _check_layer(model)
    tensors = _fuse_experts({own[name]: tensor for name, tensor in read_tensors(folder, own.keys()).items()})
    layer = layer.to_empty(device=model.device).to(model.dtype)
    load_strictly(layer, tensors, folder, _file_names(own))
    return layer.eval().requires_grad_(False)


def _fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the weights of single experts: (experts, gate and up, d) and (experts, d, inner)."""
    single: dict[tuple[str, str], dict[int, Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            single.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
        else:
            rest[name] = tensor
    stacks = {key: torch.stack([of[i] for i in sorted(of)]) for key, of in single.items()}
    for (prefix, kind), stack in stacks.items():
        if kind == "down":
            rest[f"{prefix}.down_proj"] = stack
        elif kind == "gate" and (prefix, "up") in stacks:
            rest[f"{prefix}.gate_up_proj"] = torch.cat([stack, stacks[prefix, "up"]], dim=1)
    return rest
