"""`visspec_tree`: our tree attention as an attention backend of transformers.

    tree_attention.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=tree_attention.NAME)

A draft pass then hands over the tree's ancestor relation and the rows' lengths in place of a mask over all slots; the
prompt and the vision tower attend as under sdpa. On CUDA the tree is one Triton launch, on a CPU torch's attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from visspec.cache import SlotCache, to_device
from visspec.types import Tree

NAME = "visspec_tree"


def register() -> None:
    """Makes the name known to transformers; call it before a model is loaded with it. Twice does no harm."""
    from visspec.kernels import tree_attention_forward  # Triton is imported with it

    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def draft_arguments(slots: SlotCache, tree: Tree) -> dict[str, Any]:
    """Forward arguments of a draft pass over `slots`: the relation of its nodes, each row's length and first slot.

    The relation (1|B, 1, N, N) also stands where the model expects a mask, so that it builds none; an attention that
    took it for one would fail on its size.
    """
    device = tree.ancestor.device
    return {
        "attention_mask": tree.ancestor[:, None],
        "tree_ancestors": tree.ancestor,
        "tree_lengths": to_device(slots.lengths, device),
        "tree_starts": None if slots.padding is None else (~slots.padding).sum(dim=1).to(device),
    }


def check_padding(padding: Tensor | None) -> None:
    """Raises ValueError where padding is not at the left: prefixes are given to the kernel as first and last slot."""
    if padding is not None and bool((padding[:, 1:] < padding[:, :-1]).any()):
        raise ValueError(f"attention_mask: got padding inside or after the prompt, expected it at the left ({NAME})")
