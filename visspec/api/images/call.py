"""One call of an `ImagePipeline`: its checked arguments, callbacks and interruption, and its output."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from visspec.api.text import requests
from visspec.loop.setup import DecodingSetup
from visspec.loop.stats import COLOURS, Stats
from visspec.models.image_codes.family import EncodedPrompt, Family, ImageLayout
from visspec.registry import DrafterSpec
from visspec.types import Acceptance, Order, Processor, Request, Sampling, State, Trace

ORIGINS = tuple(COLOURS)  # plain, drafted, bonus, corrected
OUTPUT_TYPES = ("pil", "np", "pt", "latent")
TENSORS = ("latents", "tokens")  # tensors that a callback may request


@dataclass
class ImageOutput:
    """Output of a call. Lists have one entry per image.

    The type of `images` depends on `output_type`. For a call, "np" is one array (B, H, W, 3) and "pt" one tensor (B, 3,
    H, W), as in diffusers; `stream` yields lists. `maps` are (rows, columns) uint8 arrays with indices into ORIGINS.
    `passes` (rows, columns) int32 has the target pass that produced each token (0 is the prefill). For images drawn
    scale by scale, both are (1, scales) and the latents are the codes of all scales, (T,).
    """

    images: list[Any] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)  # (rows * columns,) codes
    maps: list[np.ndarray] = field(default_factory=list)
    passes: list[np.ndarray] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)  # one per batch
    traces: list[Trace] = field(default_factory=list, repr=False)  # one per batch

    def extend(self, other: ImageOutput) -> None:
        for name in self.__dataclass_fields__:
            getattr(self, name).extend(getattr(other, name))


class Interrupted(Exception):
    """Raised between rounds if a callback set `interrupt`."""


@dataclass(frozen=True)
class ImageRequest:
    """Arguments of `ImagePipeline.__call__`. Raises ValueError for arguments that no model supports."""

    prompt: str | Sequence[str]
    _: KW_ONLY
    negative_prompt: str | Sequence[str] | None = None
    num_images_per_prompt: int = 1
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    height: int | None = None
    width: int | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    seed: int | Sequence[int] | None = None
    batch_size: int = 8
    drafter: DrafterSpec | EllipsisType = ...
    acceptance: str | Acceptance | None = None
    order: str | Order | None = None
    preset: str | Path | None = None
    output_type: str = "pil"
    callback_on_step_end: Callable[[Any, int, int, dict], dict | None] | None = None
    callback_on_step_end_tensor_inputs: Sequence[str] = TENSORS[:1]

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError(f"prompt: got {self.prompt!r}, expected a text or a list of texts.")
        if odd := [text for text in self.texts if text.encode(errors="replace").decode() != text]:
            raise ValueError(f"prompt: got {odd[0]!r}, expected a text that UTF-8 can encode.")  # tokenizers: TypeError
        for name in ("num_images_per_prompt", "batch_size"):
            if not isinstance(count := getattr(self, name), int) or count < 1:
                raise ValueError(f"{name}: got {count!r}, expected a whole number of at least 1.")
        if not set(self.callback_on_step_end_tensor_inputs) <= set(TENSORS):
            names = self.callback_on_step_end_tensor_inputs
            raise ValueError(f"callback_on_step_end_tensor_inputs: got {names!r}, expected {', '.join(TENSORS)}.")
        if self.output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type: got {self.output_type!r}, expected one of {', '.join(OUTPUT_TYPES)}.")
        for name in ("height", "width"):
            if (side := getattr(self, name)) is not None and (not isinstance(side, int) or side < 1):
                raise ValueError(f"{name}: got {side!r}, expected a whole number of pixels.")

    @property
    def texts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)

    def each(self, of_prompts: Sequence[str]) -> list[str]:
        """Repeat items of the prompts for every image."""
        return [one for one in of_prompts for _ in range(self.num_images_per_prompt)]


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images that are drawn together."""

    texts: list[str]
    negatives: list[str] | None  # one for each text, "" for the model's unconditional prompt; None: all are the model's
    prompt: EncodedPrompt
    seeds: list[int]


@dataclass(eq=False)
class ImageJob:
    """A checked call with everything it needs from the pipeline. Other threads only affect it through `interrupt`."""

    request: ImageRequest
    sampling: Sampling
    layout: ImageLayout
    family: Family
    setup: DecodingSetup
    batches: list[ImageBatch]
    interrupt: bool = False
    thread: int = field(default_factory=threading.get_ident)  # the thread that runs it, or ran its latest batch

    @property
    def tokens(self) -> int:
        """Total number of tokens to generate."""
        return sum(len(one.texts) for one in self.batches) * self.layout.positions


@dataclass
class ProgressCallback:
    """Runs after every round: updates the progress bar, calls the callback, and keeps the state for interruption."""

    pipeline: Any
    job: ImageJob
    bar: tqdm
    state: State | None = None
    tokens: int = 0

    def __call__(self, state: State) -> None:
        self.state, previous = state, self.tokens
        self.tokens = sum(map(len, state.tokens))
        self.bar.update(self.tokens - previous)
        request = self.job.request
        if request.callback_on_step_end is not None:
            tensors = tensors_so_far(state, self.job.layout, request.callback_on_step_end_tensor_inputs)
            handed = {"state": state, **tensors}
            back = request.callback_on_step_end(self.pipeline, len(state.trace.rounds), self.tokens, dict(handed)) or {}
            if changed := [name for name, value in back.items() if value is not handed.get(name)]:
                raise ValueError(f"callback_on_step_end: The callback changed {changed[0]!r}, which is read-only.")
        if self.job.interrupt:
            raise Interrupted


def origin_map(origin: list[str], layout: ImageLayout) -> np.ndarray:
    """Return the origin of each code, (rows, columns) uint8 indices into ORIGINS."""
    kinds = np.array([ORIGINS.index(o) for o in origin], np.uint8)
    return layout.placed(kinds)


def pass_numbers(origin: list[str]) -> list[int]:
    """Return the target pass of each token in raster order. A pass ends with a token that was not drafted."""
    passes, now = [], 0
    for kind in origin:
        passes.append(now)
        now += kind != "drafted"
    return passes


# --- arguments --------------------------------------------------------------------------------------------------------


def negatives_of(
    negative: str | Sequence[str] | None, texts: list[str], guidance: float, family: Family
) -> list[str] | None:
    """Return a negative prompt for each text; None for the model's own. Raises ValueError if it has no effect."""
    if negative is None:
        return None
    negatives = [negative] * len(texts) if isinstance(negative, str) else list(negative)
    if len(negatives) != len(texts):
        raise ValueError(f"negative_prompt: got {len(negatives)} texts, expected {len(texts)}, one for each prompt.")
    why = "" if family.guided else f"{family.name} has no unconditional prompt"
    why = why or ("without guidance (guidance_scale 1) it has no effect" if guidance == 1.0 else "")
    worded = [text for text in negatives if text.strip()]
    if why and worded:
        raise ValueError(f"negative_prompt: got {worded[0]!r}, expected None: {why}")
    return None if why else negatives


def warn_of_words(processor: Processor | None, **texts: list[str]) -> None:
    """Warn about words in prompts that the model does not know."""
    for name, those in texts.items():
        if words := requests.unknown_words(processor, those):
            expected = "expected words that the model was taught, no image will show others"
            warnings.warn(f"{name}: got {', '.join(words)}, {expected}", stacklevel=3)


def encode_prompts(
    family: Family, texts: list[str], negatives: list[str] | None, layout: ImageLayout, guidance: float
) -> EncodedPrompt:
    """Encode prompts and negative prompts for the family. Raises ValueError as `family.check`."""
    prompt = family.prompt(texts, guidance != 1.0, layout, negatives)
    try:
        family.check(prompt, layout, guidance)
    except ValueError as error:
        if negatives is None:
            raise
        family.check(family.prompt(texts, guidance != 1.0, layout), layout, guidance)
        raise ValueError(f"negative_{error}") from None  # the prompts alone are valid
    return prompt


def request_of(prompt: EncodedPrompt, layout: ImageLayout, sampling: Sampling, seeds: Sequence[int]) -> Request:
    """Return the request for images of encoded prompts, with a seed for each."""
    device = prompt.ids.device
    request = Request(prompt, prompt.ids, layout.positions, sampling, grid=layout.grid)
    if bool((layout.fixed >= 0).any()):
        request.fixed = layout.fixed.to(device)
    if not sampling.greedy:
        request.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    return request


# --- tensors for callbacks --------------------------------------------------------------------------------------------


def tensors_so_far(state: State, layout: ImageLayout, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the codes of a batch after a round, int64 on the CPU, -1 where there is none yet. "tokens" is (B, rows *
    columns), "latents" (B, rows, columns). Vectors of d numbers have one more dimension and are NaN where there is
    none. Orders other than raster only have codes at the end.
    """
    if not names:
        return {}
    rows = [state.output.values(row).cpu() for row in range(len(state.tokens))]
    none = float("nan") if rows[0].is_floating_point() else -1
    room = [row.new_full((layout.length - len(row), *row.shape[1:]), none) for row in rows]
    codes = layout.codes(torch.stack([torch.cat(pair) for pair in zip(rows, room)]))
    tensors = {"tokens": codes, "latents": layout.latents(codes)}
    return {name: tensors[name] for name in names}
