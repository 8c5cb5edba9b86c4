"""Fields of the benches' result files, used by the benches and by the report.

`METHOD`: fields of one measured method, which is a caption record or a row of an image record. `FILE`: fields shared by
all rows of an image record. `RecordImage`: an entry of `images`. docs/evaluate.md explains the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

NUMBER, INTERVAL, TEXT, FLAG = "a number", "[low, high]", "a text", "true or false"
NUMBERS, LIST, OBJECT, GRID = "numbers", "a list", "an object", "rows of numbers, null where there is none"

FILE = {"bench": TEXT, "target": TEXT, "rows": LIST, "failures": LIST, "stock": OBJECT}
FILE |= dict.fromkeys(("n_prompts", "batch_size", "seed", "guidance_scale", "temperature"), NUMBER)
FILE |= {"provenance": OBJECT}
METHOD = {
    "trunk_passes": NUMBER, "head_calls": NUMBER, "draft_head_calls": NUMBER,
    # what ran
    "bench": TEXT, "name": TEXT, "target": TEXT, "drafter": TEXT, "drafter_name": TEXT, "acceptance": TEXT,
    "order": TEXT,
    "n_prompts": NUMBER, "batch_size": NUMBER, "max_new_tokens": NUMBER, "temperature": NUMBER, "seed": NUMBER,
    "provenance": OBJECT, "failures": LIST,
    # speed
    "speedup": NUMBER, "speedup_ci95": INTERVAL, "speedup_decode_only": NUMBER, "speedup_total_time": NUMBER,
    "ratios": NUMBERS, "over_plain": NUMBER, "over_plain_ci95": INTERVAL, "in_words": TEXT, "baselines": OBJECT,
    "plain_over_transformers": NUMBER, "plain_over_transformers_ci95": INTERVAL, "tokens_per_prompt": NUMBER,
    "ideal_speedup": NUMBER, "measured_over_ideal": NUMBER, "verify_over_plain": NUMBER, "draft_over_plain": NUMBER,
    "host_over_plain": NUMBER, "gap": OBJECT, "time_s": OBJECT, "ms_per_nfe": NUMBER,
    # passes
    "tau": NUMBER, "tau_without_bonus": NUMBER, "tau_macro": NUMBER, "nfe": NUMBER, "nfe_plain": NUMBER,
    "nfe_reduction": NUMBER, "nfe_reduction_ci95": INTERVAL,
    "acceptance_by_depth": NUMBERS, "reached_by_depth": NUMBERS, "acceptance_map": GRID,
    "acceptance_map_n": GRID,
    # equality
    "guarantee": TEXT, "promises_tokens": FLAG, "identical": NUMBER, "compared": NUMBER, "identical_to": TEXT,
    "equality": OBJECT, "drift_per_token": NUMBER, "unmetered": TEXT, "latent_displacement": NUMBER,
    # quality
    "quality_n": NUMBER, "right": NUMBER, "geneval": NUMBER, "geneval_ci95": INTERVAL, "strict": NUMBER,
    "strict_ci95": INTERVAL, "fd": NUMBER, "fd_ratio": NUMBER, "fd_name": TEXT, "fd_noise_floor": NUMBER,
    "fd_paired": NUMBER, "fd_paired_floor": NUMBER,
    # to look at
    "texts": LIST, "thumbnails": LIST, "images": LIST,
}  # fmt: skip
FORMER = {  # fields that are no longer written, read for compatibility with older and external files
    "method": "a label given by hand stands before `name`",
    "verdicts": "one of each image, as its `verdict`",
}


@dataclass(frozen=True)
class RecordImage:
    """One image of a method, as a path inside the folder of the record or as a small PNG in base64.

    verdict: {"correct", "reason"}; external files may have a boolean or text. acceptance: (rows, columns) by token, 1
    if the drafted token was accepted, 0 if it was replaced, None if nothing was drafted.
    """

    prompt: object = ""
    seed: object = ""
    path: str | None = None
    png: str | None = None
    verdict: object = None
    acceptance: list[list[float | None]] | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> RecordImage:
        """From a JSON object; the previous version named the verdict `right`."""
        known = {f.name: entry[f.name] for f in fields(cls) if entry.get(f.name) is not None}
        return cls(**({"verdict": entry["right"]} if isinstance(entry.get("right"), bool) else {}) | known)

    def entry(self) -> dict[str, Any]:
        """The JSON object, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def judged(self) -> tuple[bool | None, str]:
        """(right, wrong or not judged; the reason)."""
        value = self.verdict
        if isinstance(value, dict):
            right = value.get("correct")
            return (right if isinstance(right, bool) else None), str(value.get("reason") or "")
        return (value, "") if isinstance(value, bool) else (None, "" if value is None else str(value))
