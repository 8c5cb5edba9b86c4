"""Any stock transformers decoder as a target, run unmodified through its mask, positions and cache.

It covers text decoders and vision-language models alike: differences are read from the model's configuration once
(`describe`). Shapes: B rows, L prompt, N nodes, S slots, V vocabulary, F features, d hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from visspec import tree as trees
from visspec.cache import SlotCache, contiguous_copy, gather_rows
from visspec.distributions import Categorical
from visspec.loop.decode import TokenBuffer
from visspec.models.attention import draft_attention, rotary
from visspec.models.attention.pass_inputs import (
    CACHE,
    HYBRID,
    MASK,
    NAME,
    STATEFUL,
    AttentionInputs,
    Backend,
    DecoderRecorder,
    Masks,
    SlotLayers,
    cache_argument,
    cached_layers,
    restarts,
)
from visspec.models.attention.recurrent import RecurrentStateCheckpoints, state_layers, state_modules
from visspec.models.decoder import invariant, probe
from visspec.models.decoder.layer_skip import LayerSubset
from visspec.models.layers import depth
from visspec.models.runner.compiled import CompiledPasses, compiled_passes
from visspec.models.runner.graphs import GraphedForward, graphed_forward
from visspec.models.runner.widths import PassWidths
from visspec.sampling import process, warp
from visspec.types import Capabilities, Draft, Outcome, Request, Scores, State, Target

# earlier versions return only the listed layers, without embeddings, so all are requested (tested with 5.17)
LISTED_FEATURES = Version(transformers.__version__) >= Version("5.23")
LAST = (-1,)
ATTENDING = frozenset({"full_attention", "sliding_attention"})
ATTENTION_WITH_TREES = {"sdpa", "eager"}
CROSS_ATTENDED = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")
MOST_POSITIONS = 1 << 20  # longer prompts are checked as if they had this length
CONTENT_IDS = tuple(f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index"))


class HFDecoder(Target):
    """A loaded model as a `Target`. Weights, configuration and attention backend are not changed.

    `features` are indices into `hidden_states` (0 = embeddings, -1 = last, after the final norm, n + 1 of n layers =
    last, before it), concatenated for the drafter; `embeddings` adds the prompt's input embeddings, and `states`
    adds the LM head's input ("states" in `aux`, for all passes) for training. Raises ValueError for a model that
    cannot be verified with trees or chains (encoder-decoders, recurrent layers, attention backends without 4-D
    masks), or that fails `probe`; `check=False` disables the probe.

    Args:
        compile: See `compiled_passes`.
    """

    passes: CompiledPasses | None = None
    recorder: GraphedForward | None = None

    def __init__(
        self,
        model: Any,
        features: tuple[int, ...] = (),
        embeddings: bool = False,
        check: bool = True,
        compile: bool = False,
        attention: str | None = None,
        states: bool = False,
    ):
        self.model = model
        self.capabilities = describe(model, features)
        self.embeddings, self.head_states = embeddings, states
        text = model.config.get_text_config()
        mixed = bool(getattr(text, "layer_types", None))  # such models need a mask per layer type
        self.decoder = model.get_decoder()
        self.cache_name: str = cache_argument(model.forward) or cache_argument(self.decoder.forward) or CACHE
        self._prepared_cache = cache_argument(model.prepare_inputs_for_generation) or CACHE
        floating = (p.dtype for p in self.decoder.parameters() if p.is_floating_point())  # quantized weights: integers
        name, dtype = draft_attention.implementation(text), next(floating, torch.float32)
        forced = attention or (None if check else MASK)
        backend = draft_attention.choose_backend(self.decoder, text, name, dtype, self.device, forced)
        shared = draft_attention.groups(self.decoder, check) if name == draft_attention.STOCK else 1
        self.masks = Masks(dtype, _sliding_window(text), mixed, shared, backend)
        self.configs = draft_attention.configurations(self.decoder)
        self.widths: PassWidths | None = None
        # the last layer's output is the decoder's output, unless the decoder has its own head
        headed = getattr(self.decoder, "get_output_embeddings", lambda: None)() is not None
        self.watched = tuple(features) == LAST and not headed
        inner = features and not self.watched
        self.last_layer = self.decoder.layers[-1] if depth(model) + 1 in features else None
        self._outputs = {"output_hidden_states": list(features) if LISTED_FEATURES else True} if inner else {}
        self.rotary, self.cached = rotary.modules(self.decoder), cached_layers(model.config)
        self.states = state_layers(model.config)
        self.state_modules = state_modules(self.decoder, self.states)
        if len(self.state_modules) < len(self.states):
            self.capabilities = replace(self.capabilities, trees=False)
        self.restarts = restarts(model, 1, 2 * max(getattr(text, "max_position_embeddings", None) or 1, 2))
        self.probed = check and self.device.type != "meta"
        answer = probe.check(self) if check else probe.ProbeResult()
        self.padding, self.rounding = answer.padding, answer.error
        self._pads: bool | None = None
        self.continues: dict[tuple, bool] = {}  # whether prompts of a kind can start from a kept prompt (`prefix`)
        hooked = "" if self.last_layer is None else "a drafter that reads its last layer"
        why = "layers that keep a state" if self.states else hooked
        self.joins: dict[Hashable, bool] = {}  # whether media of a kind can be concatenated (`probe.joins`)
        self.passes = compiled_passes(model, self.decoder, why) if compile else None
        self.layer_subset = LayerSubset(model, self.decoder)

    def fix_widths(self) -> None:
        """Make each row's result independent of the batch. Drafts become chains, and attention takes a mask."""
        self.capabilities = replace(self.capabilities, trees=False)
        self.masks.backend = Backend(MASK, why="batch_invariant=True")
        self.widths = invariant.pass_widths(self)
        if self.probed:
            probe.check_rows(self)

    def record(self, asked: bool | None, compile: bool = False) -> None:
        text = self.model.config.get_text_config()
        if not self.head_states:  # CUDA graphs do not return them
            states = bool(self.states)
            self.recorder = graphed_forward(asked, compile, self.model, self.decoder, self.masks, text, states)
        if self.recorder is not None:
            self.passes = None

    @property
    def device(self) -> torch.device:
        """Device of ids and distributions. Offloaded weights are on the meta device between passes."""
        device, hook = self.model.device, getattr(self.model, "_hf_hook", None)
        return device if device.type != "meta" else torch.device(getattr(hook, "execution_device", device))

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompt as in transformers' generate. `request.inputs` are its prepared model arguments.

        Scores: logits (B, 1, V) after the prompt; features (B, L, F); aux: embeddings (B, L, d), positions
        (B, L) or (3|4, B, L), attention (B, L) bool or None. A prompt given as `inputs_embeds` has no ids.
        """
        plan, request.prefix = request.prefix, None
        if plan is not None and plan.known:
            return plan.cache.prefill(self, request, plan)
        inputs = dict(request.inputs)
        rows, length = request.prompt.shape
        if length == 0:
            length = inputs["inputs_embeds"].shape[1]
        attention = inputs.get("attention_mask")
        if self.widths is not None and (rows > 1 or (attention is not None and not bool(attention.all()))):
            return invariant.prefill(self, request)
        self._check_request(request, length)
        moves = bool(request.each) or (self.recorder is not None and self.recorder.due(request))
        cache = self.cache(rows, request.max_new_tokens, lean=moves)
        cache.slots.open(length, self.device)
        self.open(cache.slots)
        inputs[self._prepared_cache] = cache
        arguments = self.model.prepare_inputs_for_generation(request.prompt, is_first_iteration=True, **inputs)
        dropped = inputs.get("position_ids") is not None and arguments.get("position_ids") is None
        # preparation may rename the cache, or drop it while it is empty and let the model create its own
        arguments = {name: value for name, value in arguments.items() if value is not cache}
        arguments[self.cache_name] = cache
        arguments.update(self._outputs)
        turning = rotary.SteppedRope(self.rotary, new=request.max_new_tokens)
        with DecoderRecorder(self.decoder, self.last_layer) as record, turning:
            output = self.model(**arguments, return_dict=True)
        positions = record.get("position_ids")
        if dropped and (positions is None or positions.dim() == 3):  # the next position is unknown
            raise ValueError(f"model: {type(self.model).__name__} counts positions itself, expected position_ids.")
        cache.check_written(self.model, self.cached)
        cache.prompt = cache.slots.nodes
        cache.slots.commit([list(range(cache.prompt))] * rows)
        if attention is not None and not bool(attention.all()):
            if cache.prompt != attention.shape[1]:
                raise ValueError(
                    f"attention_mask: got padding of a prompt of {attention.shape[1]} ids that takes {cache.prompt}"
                    " places, expected rows of one length."
                )
            cache.slots.padding = attention.bool()
        if positions is None:
            positions = torch.arange(length, device=request.prompt.device).expand(rows, length)
        newest = _last_position(positions).expand(rows)
        if self.rotary:
            cache.lag, cache.moves = newest.max() - newest, turning.moves
        ids = request.prompt if request.prompt.shape[1] else request.prompt.new_zeros(rows, 1)
        state = State(request, ids[:, -1], newest, cache, list(range(rows)), TokenBuffer(request, rows))
        aux = {"positions": positions, "attention": cache.slots.padding}
        if self.embeddings:
            aux["embeddings"] = record["inputs_embeds"]
        if request.keep_raw:
            aux["raw"] = output.logits[:, -1:]
        if self.head_states and record["last_hidden_state"] is not None:
            aux["states"] = record["last_hidden_state"][:, -1:]
        logits = process(output.logits[:, -1:], trees.empty_draft(state.pending), state)
        scores = Scores(Categorical(logits), self.features(output, record), aux)
        if self.widths is not None:
            cache.slots.extents = self.widths.extent
        if plan is not None:
            plan.cache.misses += rows
            plan.made = plan.cache.put(plan.keys, state.rows, state, scores)
        return state, scores

    def cache(self, rows: int, answer: int = 0, lean: bool = False) -> SlotLayers:
        past = RecurrentStateCheckpoints(state_layers(self.model.config), rows) if self.states else None
        return SlotLayers(rows, answer, lean, past)

    def open(self, slots: SlotCache) -> None:
        """Prepare compiled or recorded passes for a request, before its prefill."""
        if self.passes is not None:
            self.passes.open(slots)
        if self.recorder is not None:
            self.recorder.open()

    def _check_request(self, request: Request, length: int) -> None:
        for name in CROSS_ATTENDED:
            if request.inputs.get(name) is not None:
                raise ValueError(f"{name}: got states that every pass attends to, expected images in the prompt.")
        attention = request.inputs.get("attention_mask")
        if not self.padding and attention is not None and not bool(attention.all()):
            raise ValueError(f"attention_mask: got padding, which {type(self.model).__name__} does not support.")
        if not self.restarts:
            return
        longest = request.prompt.shape[1] + request.max_new_tokens - 1
        if restarts(self.model, length, min(longest, MOST_POSITIONS)):
            raise ValueError(
                f"max_new_tokens: got {request.max_new_tokens} after a prompt of {length}, but"
                f" {type(self.model).__name__} recomputes its cache within that range; use fewer new tokens."
            )

    def verify(self, state: State, draft: Draft) -> Scores:
        """Run one pass over all nodes of all rows. Returns scores for (B, N)."""
        replayed = None
        if self.recorder is not None:
            inputs = draft.value, state.position[:, None] + draft.tree.depth
            replayed = self.recorder.run(state, draft.tree, inputs, self._whole, lambda: self._eager(state, draft)[0])
        logits, features, states = (*replayed, None) if replayed else self._eager(state, draft)
        assert logits is not None
        aux = {"raw": logits} if state.request.keep_raw else {}
        if states is not None:
            aux["states"] = states
        return Scores(Categorical(process(logits, draft, state)), features, aux)

    def law(self, request: Request) -> Callable[[Tensor], Tensor] | None:
        if not self.head_states or any(own.processors for own in request.samplings):
            return None
        text, head, sampling = self.model.config.get_text_config(), self.model.get_output_embeddings(), request.sampling
        scale = 1.0 / (getattr(text, "logits_scaling", None) or 1.0)
        for name in ("logit_scale", "lm_head_multiplier"):
            scale *= getattr(text, name, None) or 1.0
        cap = getattr(text, "final_logit_softcapping", None)

        @torch.no_grad()
        def law(states: Tensor) -> Tensor:
            logits = head(states) * scale if scale != 1.0 else head(states)
            return warp(torch.tanh(logits / cap) * cap if cap else logits, sampling)

        return law

    def _eager(self, state: State, draft: Draft) -> tuple[Any, Tensor | None, Tensor | None]:
        """Return logits, features and head states (B, N) of a pass without a CUDA graph."""
        model = self.model
        if self.passes is not None:
            model = self.passes.choice(state, lambda model, dummy: self._pass(model, state, dummy)[0].logits)
        past, size = state.cache.past, draft.tree.size
        if past is None:
            (output, record), own_BN = self._pass(model, state, draft), None
        else:
            (output, record), own_BN = past.run(functools.partial(self._pass, model), state, draft, self.state_modules)
        states = record["last_hidden_state"] if self.head_states else None
        outputs = [output.logits, self.features(output, record), states]
        if own_BN is not None:
            outputs = [None if x is None else gather_rows(x, own_BN) for x in outputs]
        logits, features, states = [None if x is None else x[:, :size] for x in outputs]
        return logits, features, states

    def partial(self, state: State, value: Tensor, level: int, skip: frozenset[int]) -> Tensor:
        slots: SlotCache = state.cache.slots
        saved = slots.lengths, slots.mask
        try:
            slots.lengths, slots.mask = [n + level for n in slots.lengths], None
            ahead = replace(state, position=state.position + level)
            return self._pass(self.layer_subset(skip), ahead, trees.empty_draft(value))[0].logits[:, 0]
        finally:
            slots.lengths, slots.mask = saved

    def keys_and_values(self, state: State, layers: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        slots, places = state.cache.slots, [state.cache.written[layer] for layer in layers]
        pairs = [(slots.keys[n][:, :, : slots.length], slots.values[n][:, :, : slots.length]) for n in places]
        if slots.uniform and slots.padding is None:
            return pairs, None
        return pairs, slots.committed_mask(self.device)

    def _pass(self, model: PreTrainedModel, state: State, draft: Draft) -> tuple[Any, dict[str, Any]]:
        """Run `model` on a draft. Returns its output, and the decoder's recorded inputs and outputs."""
        slots: SlotCache = state.cache.slots
        last = draft.tree.size - 1
        if self.widths is not None:
            draft = self.widths.pad(draft)
        tree = draft.tree
        extent = slots.open(tree.size, self.device)
        ids = contiguous_copy(draft.value) if slots.steady else draft.value
        attention = self.masks(slots, tree, extent)
        positions = state.position[:, None] + tree.depth.clamp(max=last)
        lag = state.cache.lag[:, None] + 1 if state.cache.moves else None
        moved = nullcontext() if lag is None else rotary.SteppedRope(self.rotary, positions + lag)
        parts = nullcontext() if self.widths is None else self.widths.in_parts(ids.numel())
        with parts, moved:
            return self.forward(model, state.cache, attention, ids, positions)

    def forward(
        self,
        model: PreTrainedModel,
        cache: SlotLayers,
        attention: AttentionInputs,
        ids: Tensor,
        positions: Tensor,
        recorded: bool = False,
        **more: object,
    ) -> tuple[Any, dict[str, Any]]:
        """Run `model`. Returns its output, and the decoder's recorded inputs and outputs."""
        recorded = recorded or self.watched or self.head_states or self.last_layer is not None
        switched = draft_attention.switch_attention(self.configs) if NAME in attention else nullcontext()
        with DecoderRecorder(self.decoder, self.last_layer) if recorded else nullcontext({}) as record, switched:
            output = model(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{self.cache_name: cache},
                **attention,
                **self._outputs,
                **more,
            )
        return output, record

    def _whole(
        self, model: PreTrainedModel, cache: SlotLayers, attention: AttentionInputs, ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        output, record = self.forward(model, cache, attention, ids, positions)
        return output.logits, self.features(output, record)

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        if state.cache.past is not None:
            state.cache.past.commit(outcome, draft.tree.size)
        state.cache.slots.commit(outcome.path)

    def finish(self, state: State) -> None:
        if self.recorder is not None:
            self.recorder.finish(state.cache.slots, state.request.keep_cache)

    def select(self, state: State, keep: list[int]) -> None:
        state.cache.select(keep, stash=state.request.keep_cache)

    @property
    def pads(self) -> bool:
        """Return whether left-padding leaves each row's result unchanged. Not with rotary frequencies that depend on
        the longest prompt, with positions that count padding, or if the model drops its cache at some length.
        """
        if self._pads is None:
            fixed = not self.rotary and not self.restarts
            self._pads = self.padding and fixed and (not self.probed or probe.pads(self))
        return self._pads

    def join(self, state: State, other: State, take: list[int]) -> None:
        state.cache.join(other.cache, take)

    def features(self, output, record: dict[str, Any]) -> Tensor | None:
        layers = self.capabilities.feature_layers
        if not layers:
            return None
        if self.watched:
            return record["last_hidden_state"]
        states, before_norm = output.hidden_states, depth(self.model) + 1
        features = [record["before_norm"] if i == before_norm else states[i] for i in layers]
        return features[0] if len(features) == 1 else torch.cat(features, dim=-1)


def _last_position(positions: Tensor) -> Tensor:
    """Return the position of each row's last prompt token, (1|B,); generate continues from it, also with M-RoPE.

    Raises ValueError if its M-RoPE rows (time, height, width) differ: the prompt ends inside an image or a video.
    """
    if positions.dim() == 2:
        return positions[:, -1]
    time, height, width = positions[-3:, :, -1]
    if not torch.equal(time, height) or not torch.equal(time, width):
        raise ValueError("input_ids: got a prompt that ends inside an image or a video, expected text after it.")
    return time


def describe(model: PreTrainedModel, features: tuple[int, ...] = ()) -> Capabilities:
    """Read the capabilities of a loaded model from its configuration. Raises ValueError for unsupported models."""
    try:
        return _capabilities(model, features)
    except AttributeError as error:
        message = str(error).replace(". ", ", ").rstrip(".")
        kind = type(model).__name__
        raise ValueError(f"model: got {kind}, expected a decoder with one stream of tokens ({message}).") from error


def _capabilities(model: PreTrainedModel, features: tuple[int, ...]) -> Capabilities:
    config = model.config
    text = config.get_text_config()
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model: {name} is an encoder-decoder, expected a decoder that generates from its own prompt.")
    if getattr(type(model), "_sample", GenerationMixin._sample) is not GenerationMixin._sample:
        raise ValueError(f"model: {name} has its own decoding loop, expected transformers' loop.")
    kinds = set(getattr(text, "layer_types", None) or ())
    states, unsupported = bool(kinds & {*STATEFUL, HYBRID}), kinds - {*ATTENDING, *STATEFUL, HYBRID}
    attends = bool(kinds & {*ATTENDING, HYBRID})
    if unsupported or (states and not attends) or (getattr(model, "_is_stateful", False) and not states):
        names = ", ".join(sorted(unsupported or kinds - ATTENDING)) or "recurrent layers"
        raise ValueError(f"model: {name} has {names}, expected full or sliding attention (drafts must be undone).")
    decoder = model.get_decoder()
    if cache_argument(decoder.forward) is None:
        raise ValueError(f"model: {name} keeps no cache of keys and values, expected one that does.")
    attention = draft_attention.implementation(text)
    if attention not in ATTENTION_WITH_TREES:
        raise ValueError(f"attn_implementation: got {attention!r}, expected 'sdpa' or 'eager', which take masks.")
    if "position_ids" not in inspect.signature(decoder.forward).parameters or getattr(text, "alibi", False):
        raise ValueError(f"model: {name} derives positions from its mask, expected one that takes position_ids.")
    deep = depth(model)
    highest = deep + hasattr(decoder, "layers")
    for index in features:
        if not -deep - 1 <= index <= highest:
            raise ValueError(f"features: got layer {index}, expected one of {-deep - 1}..{highest} ({name}).")
    return Capabilities(
        vocab=vocabulary(model),
        prompt_ids=getattr(model.get_input_embeddings(), "num_embeddings", 0),
        never_drafted=content_ids(config),
        feature_layers=tuple(features),
        trees=True,
        layers=0 if states else text.num_hidden_layers,
    )


def _sliding_window(text) -> int:
    """Return the window in tokens if any layer slides, else 0."""
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    if not slides and not getattr(text, "layer_types", None):
        slides = bool(getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None))
    return int(text.sliding_window) if slides and text.sliding_window else 0


def content_ids(config: PreTrainedConfig) -> frozenset[int]:
    """Return the placeholder ids of image, video or audio content, from all parts of a configuration."""
    parts = [config, config.get_text_config(), *(c for c in vars(config).values() if isinstance(c, PreTrainedConfig))]
    named = (getattr(part, key, None) for part in parts for key in CONTENT_IDS)
    return frozenset(i for i in named if isinstance(i, int))


def spare_id(model: PreTrainedModel) -> int:
    """Return an id that never occurs in answers: an image placeholder, or padding."""
    text = model.config.get_text_config()
    return min((i for i in content_ids(model.config) if i < text.vocab_size), default=text.pad_token_id or 0)


def text_sizes(model: PreTrainedModel) -> dict[str, Any]:
    """Return the target's sizes as fields of a text drafter's configuration."""
    text = model.config.get_text_config()
    return {
        "family": model.config.model_type,
        "hidden": text.hidden_size,
        "vocab": vocabulary(model),
        "target_layers": depth(model),
    }


def vocabulary(model: PreTrainedModel) -> int:
    """Return the number of logits, also for quantized weights. Raises ValueError for a model without a head."""
    head = model.get_output_embeddings()
    size = getattr(head, "out_features", None)
    if size is None:
        size = next(iter(getattr(getattr(head, "weight", None), "shape", ())), None)
    if size is None:
        raise ValueError(f"model: {type(model).__name__} has no output embeddings, expected a head over a vocabulary.")
    return size


def unwrap_adapter(model: Any) -> Any:
    """Return the model inside a `PeftModel`, with the adapter in its layers, or any other model itself.

    Raises ValueError for an adapter outside the layers, such as virtual tokens before the prompt.
    """
    if not hasattr(model, "get_base_model") or not hasattr(model, "active_peft_config"):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        kind = type(config).__name__
        raise ValueError(f"model: got an adapter of {kind}, expected one in the layers only, such as LoRA.")
    return model.get_base_model()


def loop_model(model: nn.Module) -> PreTrainedModel:
    """Return the model that runs the decoding loop: the given one, the one inside a `PeftModel`, or the one that a
    custom `generate` calls.

    Raises ValueError for a `generate` that does neither.
    """
    inner: PreTrainedModel = unwrap_adapter(model)
    generate = getattr(type(inner), "generate", GenerationMixin.generate)
    names = inspect.unwrap(generate).__code__.co_names
    if generate is GenerationMixin.generate or "super" in names:
        return inner
    for name, child in inner.named_children():
        if name in names and isinstance(child, GenerationMixin):
            return cast(PreTrainedModel, child)
    raise ValueError(f"model: {type(inner).__name__} has its own generate, expected transformers' loop.")
