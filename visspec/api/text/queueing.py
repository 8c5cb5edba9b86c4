"""Requests of a stream: `generate` arguments of one prompt each, and prompts merged into one batch for the prefill."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from visspec.api.text import requests
from visspec.loop.setup import DecodingSetup
from visspec.loop.stream import Answer, Stream
from visspec.models.decoder import probe
from visspec.models.decoder.prefix import PrefixCache, PrefixPlan, PromptKey
from visspec.types import Processor, Request, Tokenizer

Entry = Mapping[str, Any] | tuple[Any, Exception]  # generate's arguments, or the id and error of a failed entry
MOST_KNOWN = 256  # maximum number of cached option sets
MOST_UNCLEAR = 3  # number of groups to probe per kind while the result is unclear
ONE_PROMPT = ("num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits")


def check(setup: DecodingSetup, slots: int, ahead: int | None, options: dict[str, Any]) -> None:
    """Raise ValueError for a setup that rows can't enter, and for options that don't fit a single prompt."""
    for name, value in (("slots", slots), ("ahead", slots if ahead is None else ahead)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1.")
    if setup.drafter is not None and not setup.drafter.traits.joins:
        kind = type(setup.drafter.inner).__name__
        raise ValueError(
            f"drafter: {kind} cannot be used for streaming: implement `join` and set `joins=True` in its traits, or"
            " call `generate` for each prompt."
        )
    if isinstance(seed := options.get("seed"), (list, tuple)):
        raise ValueError(f"seed: got {len(seed)} seeds, expected one. Pass others in the prompts' own arguments.")
    requests.check(options)


def answers(
    builder: RequestBuilder,
    entries: Iterable[Entry | None],
    slots: int,
    ahead: int,
    tokenizer: Processor | Tokenizer | None,
) -> Generator[Answer, None, None]:
    """Yield the results of `accelerate.Accelerated.stream`."""
    stream = Stream(builder.setup, builder.kind, builder.together, slots, ahead)
    for answer in stream.run(builder.queue(entries)):
        id, streamer = answer.id
        answer = replace(answer, id=id)
        if streamer is not None:
            streamer.end()
        if tokenizer is not None and answer.error is None:
            answer = replace(answer, text=tokenizer.decode(answer.tokens, skip_special_tokens=True).strip())
        yield answer


class RequestBuilder:
    """Builds requests of one row from generate's arguments, and one request of many rows from requests of one."""

    def __init__(
        self,
        model: nn.Module,
        setup: DecodingSetup,
        defaults: dict[str, Any],
        prefixes: PrefixCache | None = None,
    ):
        self.model, self.setup, self.defaults, self.prefixes = model, setup, dict(defaults), prefixes
        self.seed = self.defaults.pop("seed", None)
        self.content = torch.tensor(sorted(setup.target.capabilities.never_drafted), dtype=torch.long)
        pad = getattr(model.generation_config, "pad_token_id", None)
        self.pad = int(pad) if isinstance(pad, int) and pad >= 0 else 0
        own = setup.target.model is not model  # wrapped by another generate with its own options
        self.named = frozenset(signature(cast(Callable, model.generate)).parameters) if own else frozenset()
        self.unclear: Counter[Hashable] = Counter()  # kinds of inputs with unclear probe results
        self.known: dict[Any, Request] = {}  # requests by their options, if nothing else of the prompt matters

    def queue(self, entries: Iterable[Entry | None]) -> Iterator[tuple[Any, Request | Exception] | None]:
        """Yield ((id, streamer), request) of every entry, with an exception in place of an invalid request."""
        number = count()
        for entry in entries:
            if isinstance(entry, tuple):
                yield (entry[0], None), entry[1]
            else:
                yield entry if entry is None else self._entry(entry, next(number))

    def _entry(self, entry: Mapping[str, Any], index: int) -> tuple[Any, Request | Exception]:
        """Convert one entry, in a function of its own so that its pixels are freed while waiting for the next."""
        id: object = index
        try:
            own = dict(entry)
            id = own.pop("id", index)
            return (id, own.get("streamer", self.defaults.get("streamer"))), self.request(index, own)
        except Exception as error:
            return (id, None), error

    def request(self, index: int, own: dict[str, Any]) -> Request:
        """Build the request of one entry. Raises ValueError for unsupported arguments."""
        if self.seed is not None:
            own = {"seed": self.seed + index} | own  # like rows of generate
        own = self.defaults | own
        own_options = ("seed", "generator", "streamer", "on_tokens")
        seed, generator, streamer, on_tokens = (own.pop(name, None) for name in own_options)
        requests.check(own)
        requests.adopt_stop_strings(own)
        for name in ONE_PROMPT:
            if (value := own.get(name)) not in (None, False, 1):
                raise ValueError(
                    f"{name}: got {value!r}, expected its default: a stream returns one sequence of tokens per prompt."
                )
        prompt = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        options = {name: value for name, value in own.items() if name not in prompt}
        ids = prompt.get("input_ids")
        if ids is None or ids.dim() != 2 or len(ids) != 1 or ids.shape[1] == 0:
            shape = None if ids is None else tuple(ids.shape)
            raise ValueError(f"input_ids: got shape {shape}, expected (1, length), one prompt a request.")
        prompt.setdefault("attention_mask", torch.ones_like(ids))
        request = self._prepare_options(prompt, options)
        more = {name: value for name, value in options.items() if name in self.named or name in request.inputs}
        request.prompt, request.inputs = ids, prompt | more
        if not request.sampling.greedy:
            request.generators = requests.generators(generator, seed, ids)
        request.on_tokens = on_tokens
        if streamer is not None:
            request.on_tokens = requests.streaming(streamer, ids)
            streamer.put(ids.cpu())
        return request

    def _prepare_options(self, prompt: dict[str, Tensor], options: dict[str, Any]) -> Request:
        """Let generate process options for a prompt. Plain options with a number of new tokens, without processors and
        criteria, are processed once, since this takes milliseconds.
        """
        ids = prompt["input_ids"]
        plain = all(isinstance(value, int | float | str | None) for value in options.values())
        key = tuple(sorted((name, repr(value)) for name, value in options.items())) if plain else None
        if key is not None and (cached := self.known.get(key)) is not None:
            return replace(cached, prompt=ids)
        if not self.named:  # custom generate functions may need pixels
            # pixels are read in the prefill; without them a model can't place image ids
            blank = torch.where(torch.isin(ids, self.content.to(ids.device)), self.pad, ids)
            prompt = {"input_ids": blank, "attention_mask": prompt["attention_mask"]}
        request = requests.of_generate(self.model, prompt, **options)
        free = not request.sampling.processors and request.stop is None and options.get("max_new_tokens") is not None
        if key is not None and free and len(self.known) < MOST_KNOWN:
            self.known[key] = replace(request, inputs=dict.fromkeys(request.inputs))  # drops the prompt
        return request

    def kind(self, request: Request) -> Hashable:
        """Return what requests must share to be prefilled together. The shapes of pixels, other arguments, temperature
        and cuts, and if the target can't pad, the length of the prompt and its own padding. A request with tensors
        inside an argument, such as outputs of an image encoder, is prefilled alone.
        """
        length = request.prompt.shape[1]
        if not all(isinstance(value, Tensor) or is_plain(value) for value in request.inputs.values()):
            return id(request)
        shapes = [
            (name, value.dtype, None if of_ids(value, length) else value.shape[1:])
            if isinstance(value, Tensor)
            else (name, repr(value))
            for name, value in request.inputs.items()
        ]
        sampling = replace(request.sampling, processors=())
        if self.setup.target.pads:
            return frozenset(shapes), sampling
        mask = request.inputs.get("attention_mask")
        return frozenset(shapes), sampling, length, None if mask is None else tuple(mask.flatten().tolist())

    def together(self, group: Sequence[Request]) -> Request | None:
        """Merge requests into one with a row for each, or return None if the model needs the rows one at a time. Rows
        share cached prefixes with each other and with earlier prompts.
        """
        if len(group) > 1 and not self._can_join(group):
            return None
        cache = None if self.prefixes is None else self.prefixes.open(self.setup.target)
        keys = [] if cache is None else [key for r in group if (key := self._key(r)) is not None]
        if cache is None or len(keys) < len(group):
            return self._batch(group)
        hits, first = cache.find(keys)
        if len(first) == len(group):
            merged = self._batch(group)
            merged.prefix = PrefixPlan(cache, keys)
            return merged
        inputs = self._inputs(group)
        limit = max(request.max_new_tokens for request in group)
        merged = Request({"attention_mask": inputs["attention_mask"]}, inputs["input_ids"], limit)
        merged.media = media_of(inputs)
        merged.prefix = plan = PrefixPlan(cache, keys, hits, first, lambda rows: self._batch([group[b] for b in rows]))
        if first:
            plan.first = self._batch([_cut(group[b], key.length) for b, key in first.items()])
            plan.first.prefix = PrefixPlan(cache, list(first.values()))
        return merged

    def _can_join(self, group: Sequence[Request]) -> bool:
        """Check, once for each kind of inputs, that the model reads concatenated media like a batch of its processor.
        Some models don't: Molmo2's patch indices count through the whole batch.
        """
        shapes = [[value.shape for value in _media(request).values()] for request in group]
        if not any(shapes):
            return True
        uneven = next((b for b, each in enumerate(shapes) if each != shapes[0]), 0)
        target, kind = self.setup.target, (frozenset(group[0].inputs), uneven > 0)
        if kind not in target.joins:
            pair = group[0], group[uneven or 1]
            changed = replace(
                pair[1], inputs=pair[1].inputs | {k: probe.reflect(v) for k, v in _media(pair[1]).items()}
            )
            joins = probe.joins(target, self._batch, *pair, changed)
            self.unclear[kind] += joins is None
            if joins is None and self.unclear[kind] < MOST_UNCLEAR:
                return False
            target.joins[kind] = bool(joins)
        return target.joins[kind]

    def _batch(self, group: Sequence[Request]) -> Request:
        inputs = self._inputs(group)
        limit = max(request.max_new_tokens for request in group)
        request = requests.of_generate(self.model, inputs, max_new_tokens=limit, do_sample=False)
        request.media = media_of(inputs)
        return request

    def _inputs(self, group: Sequence[Request]) -> dict[str, Any]:
        longest = max(request.prompt.shape[1] for request in group)
        inputs: dict[str, Any] = {}
        for name, value in group[0].inputs.items():
            parts = [request.inputs[name] for request in group]
            if not isinstance(value, Tensor):
                inputs[name] = value
            elif of_ids(value, group[0].prompt.shape[1]):
                fill = self.pad if name == "input_ids" else 0
                inputs[name] = torch.cat([nn.functional.pad(p, (longest - p.shape[1], 0), value=fill) for p in parts])
            else:
                inputs[name] = torch.cat(parts)
        return inputs

    def _key(self, request: Request) -> PromptKey | None:
        """Return the key by which equal prompts are recognised; None if a prompt can't be compared."""
        length, digest, ids, media = request.prompt.shape[1], hashlib.sha256(), [], False
        for name, value in sorted(request.inputs.items()):
            if isinstance(value, Tensor) and of_ids(value, length):
                ids.append(value[0].cpu().numpy())
                digest.update(name.encode())
                if name == "attention_mask" and not ids[-1].all():
                    return None
                continue
            digest.update(name.encode())
            if not add_to_digest(digest, value):
                return None
            media = media or not is_plain(value)
        slots = torch.isin(request.prompt[0].cpu(), self.content).nonzero()
        if media and not len(slots):
            return None
        least = int(slots[-1]) + 1 if len(slots) else 0
        return PromptKey(digest.digest(), np.stack(ids), least, frozenset(request.inputs))


def _cut(request: Request, length: int) -> Request:
    whole = request.prompt.shape[1]
    parts = {k: v[:, :length] if isinstance(v, Tensor) and of_ids(v, whole) else v for k, v in request.inputs.items()}
    return replace(request, prompt=request.prompt[:, :length], inputs=parts)


def _media(request: Request) -> dict[str, Tensor]:
    length = request.prompt.shape[1]
    return {k: v for k, v in request.inputs.items() if isinstance(v, Tensor) and not of_ids(v, length)}


def media_of(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model's inputs that are not the prompt."""
    return {k: v for k, v in inputs.items() if isinstance(v, Tensor) and k not in requests.PROMPT}


def of_ids(value: Tensor, length: int) -> bool:
    """Return whether a tensor has one number per id of the prompt."""
    return value.shape == (1, length) and not value.is_floating_point()


def is_plain(value: object) -> bool:
    """Return whether `repr` shows all of a value: numbers, strings, None, and lists, tuples and dicts of them."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes, np.generic, torch.dtype, torch.device))


def add_to_digest(digest: Any, value: object) -> bool:
    """Add all of a value to a digest, tensors and arrays by their bytes. Returns False if a part can't be read."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            return False
        digest.update(repr(("tensor", value.dtype, value.shape)).encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return True
    if is_dataclass(value) and not isinstance(value, type):
        # includes ModelOutput, whose items omit fields that are None
        value = {each.name: getattr(value, each.name) for each in fields(value)} | {"class": type(value).__name__}
    if isinstance(value, Mapping):
        digest.update(repr(("mapping", len(value))).encode())
        return all(add_to_digest(digest, part) for item in value.items() for part in item)
    if isinstance(value, (list, tuple)):
        digest.update(repr((type(value).__name__, len(value))).encode())
        return all(add_to_digest(digest, part) for part in value)
    digest.update(repr(value).encode())
    return is_plain(value)
