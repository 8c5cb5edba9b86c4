"""Conversion between transformers' generate and the loop: arguments to a `Request`, and a final `State` to its
result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from inspect import signature
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from visspec.api.text.processors import at_any_prefix
from visspec.models.attention.pass_inputs import CACHE, CACHE_NAMES
from visspec.types import Processor, Request, Sampling, State, Tokenizer

PROMPT = ("input_ids", "inputs", "inputs_embeds")
GREEDY_OR_SAMPLED = "accelerated decoding only supports greedy decoding and sampling"
REFUSED: dict[str, tuple[Any, str]] = {  # generate options: neutral value, and why other values are unsupported
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1, GREEDY_OR_SAMPLED)),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "guidance_scale"), (None, GREEDY_OR_SAMPLED)),
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model"),
        (None, "the drafter is chosen in accelerate(model, drafter=...)"),
    ),
    "custom_generate": (None, "accelerated generate is one itself. Use model.generate for others"),
    "adapter_names": (None, "all rows of a batch use the active adapter"),
    "output_attentions": (False, "a pass verifies a whole draft instead of one position"),
    "output_hidden_states": (False, "a pass over a draft includes rejected tokens"),
}
# `cache_implementation`: kinds that hold plain keys and values on the model's device, as our cache does
CACHES = (None, "dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")


def of_generate(model, inputs: dict[str, Any], **options: object) -> Request:
    """Return the request that `model.generate(**inputs, **options)` would decode, without running it."""
    caught: list[Request] = []

    def catch(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        caught.append(build(input_ids, logits_processor, stopping_criteria, generation_config, kwargs))
        return input_ids

    arguments = dict(**inputs, **options)
    adopt_cache(arguments)
    model.generate(**arguments, custom_generate=catch)
    return caught[0]


def arguments_by_name(generate: Callable, positional: Sequence, options: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a `generate` call by name, without positional ones that are None."""
    names = list(signature(generate).parameters)[: len(positional)] if positional else []
    twice = sorted(set(names) & set(options))
    if twice:
        raise TypeError(f"generate() got multiple values for argument {twice[0]!r}.")
    return {name: value for name, value in zip(names, positional) if value is not None} | options


def check(options: dict[str, Any]) -> None:
    """Raise ValueError for unsupported options, before work starts."""
    config = options.get("generation_config")
    for name, (neutral, why) in REFUSED.items():
        value = options.get(name, getattr(config, name, neutral))
        if value not in (None, neutral):
            text = value if isinstance(value, (int, float, str)) else type(value).__name__
            raise ValueError(f"{name}: got {text}, expected {neutral}: {why}")
    kind = options.get("cache_implementation", getattr(config, "cache_implementation", None))
    if kind not in CACHES:
        raise ValueError(
            f"cache_implementation: got {kind!r}, expected 'dynamic' or 'static', because accelerated decoding uses"
            " its own cache."
        )
    for name in CACHE_NAMES:
        if type(options.get(name)) not in (DynamicCache, StaticCache, type(None)):
            raise ValueError(
                f"{name}: got {type(options[name]).__name__}, expected an empty DynamicCache, StaticCache or none,"
                " because accelerated decoding uses its own cache."
            )


def adopt_cache(options: dict[str, Any]) -> None:
    """Rename the cache argument to the name in this version of transformers."""
    for name in CACHE_NAMES:
        if name in options and CACHE not in options:
            options[CACHE] = options.pop(name)


def adopt_stop_strings(options: dict[str, Any]) -> None:
    """Create the criterion for `stop_strings` here, because generate drops `tokenizer` for custom decoding."""
    config: GenerationConfig | None = options.get("generation_config")
    strings = options.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    tokenizer = options.pop("tokenizer", None)
    if strings is None:
        return
    if tokenizer is None:
        raise ValueError("stop_strings: got no tokenizer. Pass tokenizer=... too.")
    if config is not None and getattr(config, "stop_strings", None):
        options["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    criteria = options.get("stopping_criteria") or []
    options["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])


def build(input_ids, processors, criteria, config, model_kwargs: dict[str, Any]) -> Request:
    """Build a request from the arguments of a custom decoding function. Raises ValueError as `check`."""
    check({"generation_config": config})
    past = model_kwargs.pop(CACHE, None)
    if past is not None and past.get_seq_length() > 0:
        raise ValueError(f"{CACHE}: got {past.get_seq_length()} cached tokens, expected an empty cache.")
    if getattr(past, "_is_user_defined", False):
        check({CACHE: past})
    model_kwargs.pop("logits_to_keep", None)
    limit = min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=1 << 30)
    eos = {int(i) for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.flatten()}
    others = [c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))]
    return Request(
        inputs={**model_kwargs, "logits_to_keep": 1},
        prompt=input_ids,
        max_new_tokens=limit - input_ids.shape[1],
        sampling=sampling_of(processors, bool(config.do_sample), input_ids),
        eos=frozenset(eos),
        stop=(lambda ids: any(bool(torch.as_tensor(c(ids, None)).any()) for c in others)) if others else None,
        keep_logits=bool(config.return_dict_in_generate and config.output_scores),
        keep_raw=bool(config.return_dict_in_generate and config.output_logits),
        keep_cache=bool(config.return_dict_in_generate and config.use_cache is not False),
    )


def sampling_of(processors: Sequence[Callable], do_sample: bool, prompt: Tensor) -> Sampling:
    """Convert processors to a `Sampling`: final temperature, top-k and top-p become numbers, the others are called."""
    rest = list(processors)
    numbers: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    for kind, name in (
        (TopPLogitsWarper, "top_p"),
        (TopKLogitsWarper, "top_k"),
        (TemperatureLogitsWarper, "temperature"),
    ):
        if rest and do_sample and type(rest[-1]) is kind:
            numbers[name] = getattr(rest.pop(), name)
    for processor in rest:
        if hasattr(processor, "model"):
            raise ValueError(f"logits_processor: {type(processor).__name__} runs its own model. Leave it out.")
    return Sampling(processors=tuple(at_any_prefix(processor, prompt) for processor in rest), **numbers)


def generators(generator, seed, input_ids: Tensor) -> list[torch.Generator]:
    """Return one generator per row: the entries of a list on the device of the ids; otherwise new ones, seeded by an
    int (`seed + b`), a list of seeds, another generator, or torch's global one.
    """
    rows, source = input_ids.shape[0], seed if seed is not None else generator
    listed = isinstance(source, (list, tuple)) and len(source) == rows
    if listed and all(isinstance(g, torch.Generator) and g.device.type == input_ids.device.type for g in source):
        return list(source)
    return [torch.Generator(input_ids.device).manual_seed(s) for s in seeds(generator, seed, rows)]


def seeds(generator, seed, count: int, each: str = "a row") -> list[int]:
    """Return one seed for each of `count` outputs: seed + i for an int, the entries of a list, or random numbers from a
    generator (default: torch's global one). Raises ValueError if a list has another length.
    """
    what, source = ("generator", generator) if seed is None else ("seed", seed)
    if source is None:
        return torch.randint(2**62, (count,), device="cpu").tolist()
    if isinstance(source, (list, tuple)):
        if len(source) != count:
            raise ValueError(f"{what}: got {len(source)} entries, expected {count} (one {each}).")
        return [seeds(g, None, 1)[0] if isinstance(g, torch.Generator) else index(g) for g in source]
    if isinstance(source, torch.Generator):
        return torch.randint(2**62, (count,), generator=source, device=source.device).tolist()
    return [index(source) + i for i in range(count)]


def unknown_words(processor: Processor | Tokenizer | None, texts: Sequence[str]) -> list[str]:
    """Return words of prompts, without duplicates, that contain the tokenizer's unknown token, if it has one."""
    tokenizer = getattr(processor, "tokenizer", processor)
    unknown = getattr(tokenizer, "unk_token_id", None)
    words = list(dict.fromkeys(word for text in texts for word in text.split()))
    if tokenizer is None or unknown is None or not words:
        return []
    return [word for word, ids in zip(words, tokenizer(words, add_special_tokens=False)["input_ids"]) if unknown in ids]


def streaming(streamer, input_ids: Tensor) -> Callable[[list[int]], None]:
    """Return a function that feeds a transformers streamer token by token. Raises ValueError for a batch."""
    if input_ids.shape[0] != 1:
        raise ValueError(f"streamer: got a batch of {input_ids.shape[0]}, expected 1.")

    def put(new_tokens: list[int]) -> None:
        for token in new_tokens:
            streamer.put(torch.tensor([token]))

    return put


def package(state: State, input_ids: Tensor, config) -> Tensor | GenerateDecoderOnlyOutput:
    """Return sequences in the form of generate: prompt and tokens, right-padded to the longest row."""
    longest = max(map(len, state.tokens))
    pad = getattr(config, "_pad_token_tensor", None)
    pad = int(pad) if pad is not None else int(config.pad_token_id or 0)
    new_tokens = [row + [pad] * (longest - len(row)) for row in state.tokens]
    sequences = torch.cat([input_ids, torch.tensor(new_tokens, device=input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    cached = [state.cache.prompt + len(tokens) - 1 for tokens in state.tokens]
    parts: dict[str, Any] = {  # generate's annotations differ from what it returns
        "sequences": sequences,
        "scores": _steps(state.output.distributions, longest) if state.request.keep_logits else None,
        "logits": _steps(state.output.raw, longest) if state.request.keep_raw else None,
        CACHE: state.cache.dynamic(cached) if state.request.keep_cache else None,
    }
    return GenerateDecoderOnlyOutput(**parts)


def _steps(row_steps: list[list[Tensor]], longest: int) -> tuple[Tensor, ...]:
    """Stack the (V,) of every token of each row to (B, V) float32 per step, with zeros after a row's end."""
    filler = torch.zeros_like(row_steps[0][0])
    at = [[row[t] if t < len(row) else filler for row in row_steps] for t in range(longest)]
    return tuple(torch.stack(step).float() for step in at)
