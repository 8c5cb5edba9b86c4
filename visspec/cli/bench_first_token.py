"""What drafters add to the time to the first token of long prompts: the `drafters` of `visspec bench prompts`.

A random Llama reads a prompt of random ids for real, and then a drafter does: its share is the time of its own reading
over both. Drafters are untrained; what reading costs doesn't depend on weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from visspec.accept.exact import Exact
from visspec.loop.decode import start
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.decoder.small_model import SmallModel
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import FeatureDrafter
from visspec.models.lookup.ngram import NGram
from visspec.types import Drafter, Request

LONG = 8192  # tokens
WARM = 256  # tokens read before the clock starts
SMALLER = 4  # the small model has this many times less width, and heads; and half of that fewer layers


def small_model(model: nn.Module) -> SmallModel:
    """A `SmallModel` drafter for a Llama, with a quarter of its width and heads and half its layers."""
    config: Any = model.config
    small = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size // SMALLER,
        intermediate_size=config.intermediate_size // SMALLER, num_hidden_layers=max(config.num_hidden_layers // 2, 1),
        num_attention_heads=max(config.num_attention_heads // SMALLER, 1),
        num_key_value_heads=max(config.num_key_value_heads // SMALLER, 1), head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM._from_config(small, attn_implementation="sdpa").eval().to(model.device)
    return SmallModel(made, model)


DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "ngram": lambda model: NGram(),
    "feature": FeatureDrafter.for_model,
    "small_model": small_model,
}


def first_token(
    model: nn.Module, heads: str, prompts: Sequence[int], drafters: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """A row for each drafter and length of the prompt: `prefill_s` of the model, `draft_prefill_s`, and `share`, the
    second over both. Medians; prompts of `LONG` tokens or more are read once.
    """
    rows = []
    for name in drafters:
        drafter = DRAFTERS[name](model)
        target = HFDecoder(model, drafter.traits.feature_layers, drafter.traits.embeddings)
        guarded = SafeDrafter(drafter, target.capabilities, target.device)
        for length in prompts:
            ids = torch.randint(5, target.capabilities.vocab, (1, length), device=target.device)
            read(target, guarded, ids[:, :WARM])
            times = [read(target, guarded, ids) for _ in range(1 if length >= LONG else repeats)]
            prefill, own = (statistics.median(part) for part in zip(*times))
            rows.append({
                "heads": heads, "drafter": name, "prompt": length, "prefill_s": prefill, "draft_prefill_s": own,
                "share": own / (prefill + own), "repeats": len(times),
            })  # fmt: skip
    return rows


@torch.inference_mode()
def read(target: HFDecoder, drafter: SafeDrafter, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of the target's prefill of a prompt, and of the drafter's. Raises RuntimeError if the drafter failed."""
    request = Request({"attention_mask": torch.ones_like(ids), "logits_to_keep": 1}, ids, 2)
    state = start(target, drafter, Exact(), request)
    if not state.drafting:
        raise RuntimeError(f"drafter: got a failure of {type(drafter.inner).__name__}, expected it to read the prompt")
    return state.trace.times["prefill"], state.trace.times["draft_prefill"]
