"""Speculative decoding as transformers loads it from a repository: `Speculative.save_pretrained` writes a
`custom_generate/generate.py` that imports `generate`, and `model.generate(..., custom_generate=FOLDER_OR_ID,
trust_remote_code=True)` calls it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from visspec.api.accelerate import Speculative, speculative


@lru_cache(maxsize=8)
def hook(drafter: str, acceptance: str) -> Speculative:
    """One hook for all calls, since it keeps what it made for its last model."""
    return speculative(drafter, acceptance=acceptance)


def generate(
    model: GenerationMixin,
    drafter: str = "auto",
    acceptance: str = "exact",
    streamer: BaseStreamer | None = None,
    **arguments: Any,
) -> Any:
    """`model.generate(**arguments)` with drafts; drafter and acceptance by name, as in `visspec.accelerate`."""
    own: dict = {} if streamer is None else {"tok_streamer": streamer}  # transformers keeps `streamer` from hooks
    return model.generate(custom_generate=hook(drafter, acceptance), **arguments, **own)
