"""What users type: `accelerate(model, drafter)` and `speculative(drafter)` for transformers' own `custom_generate`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from visspec import requests, zoo
from visspec.engine import decode
from visspec.guard import Guarded
from visspec.models.targets.hf_decoder import HFDecoder, driven
from visspec.pace import Pace
from visspec.stats import Stats
from visspec.types import Acceptance, Capabilities, Drafter


def accelerate(
    model: nn.Module,
    drafter: str | Drafter | None = "ngram",
    *,
    acceptance: str | Acceptance = "exact",
    levels: int | None = None,
    adaptive: bool = True,
    tokenizer: Any = None,
    probe: bool = True,
) -> Accelerated:
    """Make a loaded transformers model generate several tokens a pass. The model itself is not changed.

    drafter: a name of `visspec list`, a checkpoint folder, a Drafter, a smaller transformers model, or None.
    acceptance: "exact" (default), "typical:epsilon=0.1", ..., or a rule. levels: how deep to draft at most.
    adaptive: draft less, or not at all, where that is measured to be faster.
    tokenizer: for `last_stats`, so that it can show text.
    probe: run the model on a few tokens, once for its class and configuration, to see that drafts can be verified in it.
    Raises ValueError in one sentence when the model can't be verified or the drafter was made for another target.
    """
    return Accelerated(model, drafter, acceptance, levels, adaptive, tokenizer, probe)


def speculative(drafter: str | Drafter | None = "ngram", **options) -> Speculative:
    """A callable for `model.generate(..., custom_generate=visspec.speculative(...))`. Options as in `accelerate`."""
    return Speculative(drafter, options)


class Accelerated:
    """A model with a faster `generate`. Anything else is the model's own: attributes are passed through."""

    def __init__(
        self, model, drafter="ngram", acceptance="exact", levels=None, adaptive=True, tokenizer=None, probe=True
    ):
        self.model, self.tokenizer = model, tokenizer
        self.rule: Acceptance = zoo.acceptance(acceptance) if isinstance(acceptance, str) else acceptance
        decodes = driven(model)
        inner, self.name = zoo.drafter(drafter, decodes)
        needs = inner.needs if inner is not None else frozenset()
        layers = getattr(inner, "feature_layers", ()) if "features" in needs else ()
        self.target = HFDecoder(decodes, tuple(layers), embeddings="embeddings" in needs, check=probe)
        check_pairing(inner, self.rule, self.target.capabilities)
        self.drafter = None if inner is None else Guarded(inner, self.target.capabilities, self.target.device)
        self.pace = Pace(levels or getattr(inner, "levels", 8), adaptive)
        self.last_stats: Any = None  # a Stats after the first call
        self.last_state: Any = None  # its finished State

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def generate(self, *args, streamer=None, generator=None, seed=None, **kwargs):
        """transformers' `generate`: same arguments, same return value. `generator` (or a list, one a row) or `seed`
        makes sampling repeatable without touching the global state; without them torch's global seed decides.
        """
        requests.check(kwargs)
        requests.adopt_stop_strings(kwargs)
        media = {k: v for k, v in kwargs.items() if isinstance(v, Tensor) and k not in requests.PROMPT}
        return self.model.generate(*args, custom_generate=_Run(self, streamer, generator, seed, media), **kwargs)

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class _Run:
    """One call of generate: transformers prepares everything, then calls this instead of its own loop."""

    def __init__(self, fast: Accelerated, streamer=None, generator=None, seed=None, media=None):
        self.fast, self.streamer, self.generator, self.seed = fast, streamer, generator, seed
        self.media = media or {}

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        fast = self.fast
        if model is not fast.target.model:
            raise ValueError(f"model: got a call of {type(model).__name__}, expected {type(fast.target.model).__name__}")
        request = requests.build(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        request.media, request.copies = self.media, generation_config.num_return_sequences or 1
        if not request.sampling.greedy:
            request.generators = requests.generators(self.generator, self.seed, input_ids)
        if self.streamer is not None:
            request.on_tokens = requests.streaming(self.streamer, input_ids)
            self.streamer.put(input_ids.cpu())  # generate shows the prompt to a streamer it knows; not to this one
        state = decode(fast.target, fast.drafter, fast.rule, request, fast.pace)
        if fast.drafter is not None:
            fast.drafter.finish(state)
        if self.streamer is not None:
            self.streamer.end()
        fast.last_state, fast.last_stats = state, Stats.of(state, fast.name, fast.rule, fast.tokenizer)
        return requests.package(state, input_ids, generation_config)


class Speculative:
    """The same as transformers' hook: `model.generate(..., custom_generate=speculative("ngram"))`.

    transformers drops `streamer` and `tokenizer` for hooks: pass `tok_streamer`, `generator` or `seed` to generate.
    """

    def __init__(self, drafter, options: dict[str, Any]):
        self.drafter, self.options = drafter, options
        self.fast: Accelerated | None = None

    def __call__(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config,
        tok_streamer=None, generator=None, seed=None, **model_kwargs,
    ):  # fmt: skip
        if self.fast is None or self.fast.target.model is not model:
            self.fast = accelerate(model, self.drafter, **self.options)
        run = _Run(self.fast, tok_streamer, generator, seed)
        return run(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

    @property
    def last_stats(self) -> Stats | None:
        return None if self.fast is None else self.fast.last_stats


def check_pairing(drafter: Drafter | None, rule: Acceptance, capabilities: Capabilities) -> None:
    """Once, when they are built: can this rule judge this drafter's drafts, and is the target what it needs?"""
    if drafter is not None and not hasattr(drafter, "propose"):
        raise ValueError(f"drafter: got {type(drafter).__name__}, expected one that proposes tokens")
    if hasattr(rule, "bind"):
        rule.bind(capabilities)
    if getattr(rule, "chains", False) and getattr(drafter, "trees", False):
        raise ValueError(
            f"drafter: {type(drafter).__name__} drafts trees, expected chains for the rule {type(rule).__name__}"
        )
    sampled = bool(getattr(drafter, "samples", False))
    if "q" in rule.needs and drafter is not None and not sampled:
        raise ValueError(
            f"acceptance: {type(rule).__name__} needs sampled drafts, got {type(drafter).__name__} of point masses"
        )
    if sampled and "q" not in rule.takes:
        raise ValueError(
            f"drafter: {type(drafter).__name__} samples, expected point masses for the rule {type(rule).__name__}"
        )
