"""Acceleration of text models: `accelerate(model, drafter)`, and `speculative(drafter)` as a `custom_generate` hook."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from visspec import registry
from visspec.api import saving
from visspec.api.loading import load_saved
from visspec.api.text import queueing, requests
from visspec.io import hub
from visspec.loop.draft_length import DraftLengthPolicy
from visspec.loop.setup import DecodingSetup, build_setup
from visspec.loop.stats import Stats
from visspec.loop.stream import Answer
from visspec.models.attention.draft_attention import implementation
from visspec.models.decoder import mtp_layer
from visspec.models.decoder.prefix import PrefixCache
from visspec.models.decoder.target import HFDecoder, loop_model, unwrap_adapter
from visspec.registry import DrafterSpec
from visspec.types import Acceptance, Drafter, DrafterTraits, Processor, State, Tokenizer

logger = logging.getLogger(__name__)
# attributes of Accelerated itself
OWN = frozenset({"model", "tokenizer", "last_stats", "last_state", "_options", "_made", "_why"})
NAMED = "the model's folder names it"  # a reason why "auto" chose a drafter
BUILDING = threading.RLock()  # only one thread rebuilds the setup of a moved model


def accelerate(
    model: nn.Module,
    drafter: DrafterSpec = "auto",
    *,
    acceptance: str | Acceptance = "exact",
    levels: int | None = None,
    adaptive: bool = True,
    tokenizer: Processor | Tokenizer | None = None,
    probe: bool = True,
    compile: bool = False,
    graphs: bool | None = None,
    length: str | DraftLengthPolicy | None = None,
    preset: str | Path | None = None,
    debug: bool = False,
    batch_invariant: bool = False,
) -> Accelerated:
    """Accelerate `generate` of a loaded transformers model. The model is not changed.

    Args:
        model: A loaded model.
        drafter: "auto" (default) for `default_drafter`; a name of `visspec list drafters`, a checkpoint folder, a
            Drafter, a smaller transformers model, or None.
        acceptance: A rule by name and options, such as "typical:epsilon=0.1", or as an object, which is copied.
        levels: Maximum draft depth.
        adaptive: Draft fewer tokens, or none, where that is measured to be faster. False is length="fixed".
        tokenizer: Used to show text in `last_stats`.
        probe: Run the model on a few tokens, once per configuration, to check that it can verify drafts.
        compile: Run passes over drafts, and the drafter, through `torch.compile`. The first request for 32 tokens or
            more takes tens of seconds to minutes to compile; shorter ones before it run uncompiled. Where passes are
            recorded (`graphs`), the decoder's layers are compiled first.
        graphs: Record passes over drafts, and verdicts, as CUDA graphs. None (default) does so on a CUDA device with
            "sdpa" attention and weights in float16, bfloat16 or float32. True also warns if it is not possible, False
            never records. The tokens are the same.
        length: A draft-length policy by name and options, such as "adaptive:share=0.02", or as an object, which is
            copied and keeps its own `levels`.
        preset: Drafter, acceptance and levels of a published method (`visspec list presets`), or of a file that
            `visspec tune` wrote. Other arguments take precedence.
        debug: Raise errors of the drafter instead of warning once. VISSPEC_DEBUG=1 does the same.
        batch_invariant: Make the tokens of a request independent of drafts and of its batch, in bfloat16 and float16
            too, for one device and number of threads. Drafts are chains, passes run eagerly, and prompts are read one
            at a time.

    Returns:
        The accelerated model.

    Raises:
        ValueError: If the model is not loaded or not supported, or the drafter was made for another model.
    """
    if model is None or isinstance(model, (str, Path)):
        name = "FOLDER" if model is None else str(model)
        raise ValueError(
            f"model: got {model!r}, expected a loaded model, such as visspec.api.loading.load({name!r})[0] or the"
            " result of a transformers class's `from_pretrained`."
        )
    if preset is not None:
        method = registry.preset(preset, "text", model)
        drafter, levels = method.drafter if drafter == "auto" else drafter, levels or method.levels
        acceptance = method.acceptance if acceptance == "exact" else acceptance
    length = "fixed" if length is None and not adaptive else length
    if torch.cuda.is_available() and getattr(model, "device", None) == torch.device("cpu"):
        logger.warning("The model is on the CPU, and this machine has a GPU. Call model.to('cuda') first to use it.")
    return Accelerated(
        model,
        SetupOptions(drafter, acceptance, levels, length, probe, compile, graphs, debug, batch_invariant),
        tokenizer,
    )


def speculative(drafter: DrafterSpec = "auto", **options) -> Speculative:
    """Create a hook for `model.generate(..., custom_generate=visspec.speculative(...))`.

    Args:
        drafter: As in `accelerate`.
        options: Options of `accelerate`.
    """
    return Speculative(drafter, options)


@dataclass(frozen=True)
class SetupOptions:
    """The arguments of `accelerate` that determine a setup, without the model."""

    drafter: DrafterSpec
    acceptance: str | Acceptance
    levels: int | None
    length: str | DraftLengthPolicy | None
    probe: bool
    compile: bool
    graphs: bool | None
    debug: bool
    batch_invariant: bool


@dataclass(frozen=True)
class Result:
    """The result of one `generate` call: its return value, the final state and the statistics."""

    output: Any
    state: State
    stats: Stats


class Accelerated:
    """A model with a faster `generate`.

    Other attributes are those of the model. Methods that return the model return this object instead
    (`fast.to("cuda").eval()` stays accelerated). Masks, tables and drafters given by name are rebuilt if the model's
    dtype or device changes. The object is thread-safe: `last_stats` and `last_state` refer to the last finished call,
    and `run` returns those of its own call.
    """

    model: PreTrainedModel

    def __init__(self, model: nn.Module, options: SetupOptions, tokenizer: Processor | Tokenizer | None = None):
        self.model, self.tokenizer, self._why = cast(PreTrainedModel, model), tokenizer, ""
        drafter = options.drafter
        if drafter == "auto":
            drafter, self._why = default_drafter(self.model)
        self._options = replace(options, drafter=drafter)
        self._made = (self._fits(), self._build())
        self.last_stats: Stats | None = None  # set by each call
        self.last_state: State | None = None  # finished state of that call

    @classmethod
    def from_pretrained(
        cls, where: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", **options
    ) -> Accelerated:
        """Load a folder or hub id that `save_pretrained` wrote. For other folders only the model is loaded.

        Args:
            where: Folder or hub id. Only safetensors are read. The processor, or else the tokenizer, becomes
                `tokenizer`.
            device: As in `visspec.api.loading.load`.
            dtype: As in `visspec.api.loading.load`.
            options: `trust_remote_code` (off), and options of `accelerate`, which override saved ones.

        Raises:
            ValueError: As `accelerate`, or if the checkpoint can't be read.
        """
        remote = options.pop("trust_remote_code", False)
        folder = str(hub.resolve_folder(registry.included_folder(str(where))))
        settings = saving.read(folder, options)
        strange = [name for name in ("parts", "order") if settings.pop(name, None)]
        if strange:
            raise ValueError(f"checkpoint: {where} is a pipeline with {strange[0]}, expected an accelerated model.")
        model, words = load_saved(folder, device=device, dtype=dtype, trust_remote_code=remote)
        return accelerate(model, **{"tokenizer": words, **settings})

    def save_pretrained(self, folder: str | Path, **options) -> None:
        """Write model, tokenizer, drafter, acceptance, levels and batch_invariant for `from_pretrained`.

        transformers reads the folder as the model alone.

        Args:
            folder: The folder to write to.
            options: Options of the model's own `save_pretrained`.

        Raises:
            ValueError: If something can't be saved. Nothing is written then.
        """
        words = {} if self.tokenizer is None else {"processor": self.tokenizer}
        parts = {name: getattr(self._options, name) for name in ("drafter", "acceptance", "levels", "batch_invariant")}
        if self._why not in ("", NAMED):
            parts["drafter"] = "auto"  # finds the same drafter again
        saving.save(folder, {"model": self.model, **words, **parts, "order": None, "parts": {}}, **options)

    def push_to_hub(self, repo_id: str, private: bool | None = None) -> str:
        """Upload what `save_pretrained` writes.

        Args:
            repo_id: Repository on the hub.
            private: Whether to create it as private.

        Returns:
            The URL.
        """
        return hub.push(repo_id, self.save_pretrained, private)

    @property
    def setup(self) -> DecodingSetup:
        """The current setup. A call reads it once and so is not affected by changes in other threads."""
        fits, setup = self._made
        if fits == (now := self._fits()):
            return setup
        with BUILDING:
            if self._made[0] != now:
                self._made = (now, self._build())
            return self._made[1]

    @property
    def target(self) -> HFDecoder:
        return self.setup.target

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, or None."""
        safe = self.setup.drafter
        return safe and safe.inner

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def rule(self) -> Acceptance:
        return self.setup.rule

    @property
    def length_policy(self) -> DraftLengthPolicy:
        return self.setup.length_policy

    def _fits(self) -> tuple:
        models = (m for m in (self.model, self._options.drafter) if isinstance(m, nn.Module))
        return tuple((m.dtype, m.device, implementation(getattr(m, "config", None))) for m in models)

    def _build(self) -> DecodingSetup:
        options, model = self._options, loop_model(self.model)
        check_eager(options.batch_invariant, options.compile, options.graphs)

        def make_target(traits: DrafterTraits) -> HFDecoder:
            features = traits.feature_layers, traits.embeddings
            target = HFDecoder(model, *features, check=options.probe, compile=options.compile)
            if options.batch_invariant:
                target.fix_widths()
            if traits.partial and target.capabilities.layers:
                target.layer_subset.check()
            return target

        rule, length = own_rule(options.acceptance), options.length
        if options.batch_invariant and length is None and not rule.traits.keeps_tokens:
            length = "fixed"  # measured lengths would depend on other load
        with torch.inference_mode(False), torch.no_grad():  # modules built here may be trained later
            drafter, name = registry.drafter(options.drafter, model)
            return build_setup(
                drafter,
                name,
                rule,
                model,
                make_target,
                levels=options.levels,
                length=registry.length(length),
                compile=options.compile,
                graphs=False if options.batch_invariant else options.graphs,
                debug=options.debug,
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # special methods are not forwarded to the model
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(self.model, name)
        if getattr(attribute, "__self__", None) is not self.model:
            return attribute

        @wraps(attribute)
        def call(*args, **kwargs):
            result = attribute(*args, **kwargs)
            return self if result is self.model else result

        return call

    def __setattr__(self, name: str, value: object) -> None:
        if name in OWN or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.model, name, value)

    def generate(self, *args, streamer=None, generator=None, seed=None, **kwargs):
        """Generate like transformers' `generate`, with the same arguments and return value.

        Args:
            args, kwargs: Arguments of transformers' `generate`.
            streamer: A transformers streamer, for one row.
            generator: Generator for sampling, or a list with one per row. The default is torch's global one.
            seed: Seed for sampling, which leaves the global state unchanged. Row b uses seed + b, or its entry of a
                list.
        """
        return self.run(*args, streamer=streamer, generator=generator, seed=seed, **kwargs).output

    def run(self, *args, streamer=None, generator=None, seed=None, **kwargs) -> Result:
        """Like `generate`, but return a `Result` with the final state and statistics of this call.

        Args:
            streamer: As in `generate`.
            generator: As in `generate`.
            seed: As in `generate`.
            args: Positional arguments of transformers' `generate`.
            kwargs: Arguments of transformers' `generate`.
        """
        kwargs = requests.arguments_by_name(unwrap_adapter(self.model).generate, args, kwargs)
        streamer = kwargs.pop("streamer", streamer)
        requests.check(kwargs)
        kwargs.pop("custom_generate", None)
        requests.adopt_stop_strings(kwargs)
        requests.adopt_cache(kwargs)
        media = queueing.media_of(kwargs)
        call = _Run(self.setup, self.tokenizer, streamer, generator, seed, media, self._why)
        output = cast(GenerationMixin, self.model).generate(**kwargs, custom_generate=call)
        assert call.result is not None
        self.last_state, self.last_stats = call.result
        return Result(output, *call.result)

    def stream(
        self,
        prompts: Iterable[queueing.Entry | None],
        *,
        slots: int = 8,
        ahead: int | None = None,
        prefix_cache: int | PrefixCache | None = None,
        **options: Any,
    ) -> Generator[Answer, None, None]:
        """Generate for many prompts with continuous batching: a row enters the batch as another leaves.

        The tokens of a row do not depend on its batch. An error of a prompt is its result.

        Args:
            prompts: `generate` arguments of one prompt each, and optionally its `id` (default: its number), `seed` or
                `generator`, `streamer`, and `on_tokens`, which is called with the ids of each round and ends the row if
                it returns True. They are read as slots come free; None means that no prompt is waiting now.
            slots: Number of rows decoded at once.
            ahead: Number of prompts prefilled at once (default: slots). As many more may wait, prefilled.
            prefix_cache: Bytes of keys and values to keep for prompts with a common prefix, such as the same image
                (default: 512 MiB; 0: none), or a `PrefixCache` that outlives the stream. Not available with
                `batch_invariant`.
            options: Arguments for prompts that don't have them. Prompt i gets the seed `seed + i`.

        Returns:
            The answers, in the order in which they end.

        Raises:
            ValueError: If rows can't enter a batch with this drafter.
        """
        setup = self.setup
        queueing.check(setup, slots, ahead, options)
        if prefix_cache and not isinstance(prefix_cache, PrefixCache) and self._options.batch_invariant:
            raise ValueError(
                f"prefix_cache: got {prefix_cache} with batch_invariant=True, which reads each prompt in one pass."
                " Leave it out."
            )
        prefixes = prefix_cache if isinstance(prefix_cache, PrefixCache) else PrefixCache(prefix_cache)
        builder = queueing.RequestBuilder(self.model, setup, options, prefixes)
        if setup.target.widths is not None:
            ahead, slots = 1, slots if setup.rule.traits.keeps_tokens else 1
        ahead = ahead or slots
        return queueing.answers(builder, prompts, slots, ahead, self.tokenizer)

    def __call__(self, *args, **kwargs):
        """Call the model, without acceleration.

        Args:
            args: Positional arguments of its `forward`.
            kwargs: Arguments of its `forward`.
        """
        return self.model(*args, **kwargs)


@dataclass(eq=False)
class _Run:
    """A custom decoding function for one `generate` call of transformers, which prepares its inputs."""

    setup: DecodingSetup
    tokenizer: Processor | Tokenizer | None = None
    streamer: BaseStreamer | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    seed: int | Sequence[int] | None = None
    media: Mapping[str, Tensor] = field(default_factory=dict)
    why: str = ""  # why the drafter was chosen
    result: tuple[State, Stats] | None = None  # set by the call

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        setup = self.setup
        target = setup.target
        if model is not target.model:
            raise ValueError(f"model: got a call of {type(model).__name__}, expected {type(target.model).__name__}.")
        request = requests.build(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        request.media, request.copies = self.media, generation_config.num_return_sequences or 1
        if not request.sampling.greedy:
            if target.widths is not None and len(input_ids) > 1 and not setup.rule.traits.keeps_tokens:
                raise ValueError(
                    f"batch_invariant: got {len(input_ids)} rows for the rule {type(setup.rule).__name__}, whose tokens"
                    " depend on drafts, expected one row a call, or stream()."
                )
            request.generators = requests.generators(self.generator, self.seed, input_ids)
        if self.streamer is not None:
            request.on_tokens = requests.streaming(self.streamer, input_ids)
            self.streamer.put(input_ids.cpu())  # generate passes the prompt only to its own streamer argument
        state = setup.decode(request)
        if self.streamer is not None:
            self.streamer.end()
        self.result = state, replace(Stats.of(state, setup, self.tokenizer), why=self.why)
        return requests.package(state, input_ids, generation_config)


class Speculative:
    """The hook of `speculative`. Pass `tok_streamer`, since transformers drops `streamer` for hooks."""

    def __init__(self, drafter, options: dict[str, Any]):
        self.drafter, self.options = drafter, options
        self.fast: Accelerated | None = None  # for the model of the last call
        self.last_stats: Stats | None = None

    def __call__(self, model, input_ids, *, tok_streamer=None, generator=None, seed=None, **prepared):
        fast = self.fast
        if fast is None or fast.target.model is not model:
            fast = self.fast = accelerate(model, self.drafter, **self.options)
        call = _Run(fast.setup, fast.tokenizer, tok_streamer, generator, seed, why=fast._why)
        output = call(model, input_ids, **prepared)
        assert call.result is not None
        self.last_stats = call.result[1]
        return output


def default_drafter(model: PreTrainedModel) -> tuple[DrafterSpec, str]:
    """Choose the drafter of a model for "auto". Returns it with the reason. Nothing is downloaded.

    The first of these that exists: the drafter named in `visspec.json` of the model's folder, the folder `drafter`
    there, the checkpoint's own multi-token layers, an included drafter for the model, each combined with "context"
    (`models.lookup.merged`); else "context" alone, which needs no training.
    """
    folder = getattr(model, "name_or_path", None)
    spec: DrafterSpec
    trained: str | Path | None
    if spec := saving.drafter_of(folder) if folder else None:
        trained, why = None, NAMED
    elif trained := registry.own_drafter(model):
        why = "it is in the model's folder"
    elif mtp_layer.in_files(model):
        trained, why = "mtp", "the model's files have such a layer"
    elif trained := registry.included_drafter(model):
        why = "it is made for the model"
    else:
        spec, table = "context", registry.included_drafter(model, "context")
        why = "its table is made for the model" if table else "nothing was made for the model"
    if trained:
        spec = registry.joined(trained, {"copies": True})
    logger.info("drafter: %s, because %s", spec, why)
    return spec, why


def check_eager(batch_invariant: bool, compile: bool, graphs: bool | None) -> None:
    """Raise ValueError for options that exclude each other."""
    if batch_invariant and (compile or graphs):
        raise ValueError(f"batch_invariant: got {'compile' if compile else 'graphs'}=True, expected eager passes.")


def own_rule(acceptance: str | Acceptance) -> Any:
    """Return a rule by name, or a copy of a rule, because it is bound to one target."""
    return registry.rule(acceptance) if isinstance(acceptance, str) else copy.copy(acceptance)
