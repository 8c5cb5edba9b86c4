"""Any stock transformers decoder as a target: driven through its mask, its positions and its cache, never modified.

Covers plain text decoders and vision-language models alike: what differs between families is read from the model's
configuration once (`describe`). Shapes: B rows, L prompt, N nodes, S slots, V vocabulary, F features, d hidden size.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from visspec import tree as trees
from visspec.cache import SlotCache
from visspec.models.targets import tree_attention
from visspec.models.targets.masks import Masks
from visspec.models.targets.slot_layers import SlotLayers
from visspec.sampling import process
from visspec.types import Capabilities, Draft, Outcome, Request, Scores, State

# before, a list of layers gave a tuple of those alone, without the embeddings; so all are asked for (5.17 was tried)
LISTED_FEATURES = Version(transformers.__version__) >= Version("5.23")
LAST = (-1,)
ATTENTION_WITH_TREES = {"sdpa", "eager", tree_attention.NAME}
CONTENT_IDS = tuple(f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index"))


class HFDecoder:
    """A loaded model as a `Target`. Weights, configuration and attention backend stay as they are.

    `features` are indices into `hidden_states` (0 = embeddings, -1 = last, after the final norm), handed to the drafter
    concatenated; `embeddings` asks for the prompt's input embeddings as well. Raises ValueError for a model that can't
    be verified with trees or chains (encoder-decoder, recurrent layers, attention backends that take no 4-D mask).
    """

    def __init__(self, model: Any, features: tuple[int, ...] = (), embeddings: bool = False):
        self.model = model
        self.capabilities = describe(model, features)
        self.embeddings = embeddings
        text = model.config.get_text_config()
        mixed = bool(getattr(text, "layer_types", None))  # such models take a mask per kind of layer
        self.masks = Masks(next(model.get_decoder().parameters()).dtype, _sliding_window(text), mixed)
        self.relational = text._attn_implementation == tree_attention.NAME and not self.masks.window
        inner = features and tuple(features) != LAST  # the last layer's output is seen as it leaves the decoder
        self._outputs = {"output_hidden_states": list(features) if LISTED_FEATURES else True} if inner else {}

    @property
    def device(self) -> torch.device:
        return self.model.device

    def prefill(self, request: Request) -> tuple[State, Scores]:
        """Run the prompt as transformers' own generate would. `request.inputs` are its prepared model arguments.

        Scores: logits (B, 1, V) after the prompt; features (B, L, F); aux: embeddings (B, L, d), positions
        (B, L) or (3|4, B, L), attention (B, L) bool or None. A prompt given as `inputs_embeds` has no ids.
        """
        inputs = dict(request.inputs)
        rows, length = request.prompt.shape
        if length == 0:
            length = inputs["inputs_embeds"].shape[1]
        cache = SlotLayers(rows)
        cache.slots.open(length, self.device)
        inputs["past_key_values"] = cache
        attention = inputs.get("attention_mask")
        arguments = self.model.prepare_inputs_for_generation(request.prompt, is_first_iteration=True, **inputs)
        arguments.update(self._outputs)
        with _Watch(self.model.get_decoder()) as seen:
            output = self.model(**arguments, return_dict=True)
        cache.slots.commit([list(range(length))] * rows)
        if attention is not None and not bool(attention.all()):
            cache.slots.padding = attention.bool()
            if self.relational:
                tree_attention.check_padding(cache.slots.padding)
        positions = seen.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=self.device).expand(rows, length)
        newest = _last_position(positions).expand(rows)
        ids = request.prompt if request.prompt.shape[1] else request.prompt.new_zeros(rows, 1)
        state = State(request, pending=ids[:, -1], position=newest, cache=cache, rows=list(range(rows)))
        state.tokens = [[] for _ in range(rows)]
        aux = {"positions": positions, "attention": cache.slots.padding}
        if self.embeddings:
            aux["embeddings"] = seen["inputs_embeds"]
        if request.keep_raw:
            aux["raw"] = output.logits[:, -1:]
        logits = process(output.logits[:, -1:], trees.undrafted(state.pending), state)
        return state, Scores(logits, self._features(output, seen), aux)

    def verify(self, state: State, draft: Draft) -> Scores:
        """One pass over all nodes of all rows. Scores for (B, N)."""
        slots: SlotCache = state.cache.slots
        tree = draft.tree
        extent = slots.open(tree.size, self.device)
        if self.relational:
            attention = tree_attention.draft_arguments(slots, tree)
        else:
            attention = {"attention_mask": self.masks(slots, tree, extent)}
        watched = self.capabilities.feature_layers == LAST
        with _Watch(self.model.get_decoder()) if watched else nullcontext({}) as seen:
            output = self.model(
                input_ids=draft.tokens.clamp(min=0),
                position_ids=state.position[:, None] + tree.depth,
                past_key_values=state.cache,
                use_cache=True,
                return_dict=True,
                **attention,
                **self._outputs,
            )
        aux = {"raw": output.logits} if state.request.keep_raw else {}
        return Scores(process(output.logits, draft, state), self._features(output, seen), aux)

    def commit(self, state: State, draft: Draft, outcome: Outcome) -> None:
        state.cache.slots.commit(outcome.path)

    def select(self, state: State, keep: list[int]) -> None:
        state.cache.select(keep, aside=state.request.keep_cache)

    def _features(self, output, seen: dict[str, Any]) -> Tensor | None:
        layers = self.capabilities.feature_layers
        if not layers:
            return None
        if layers == LAST:
            return seen["last_hidden_state"]
        states = output.hidden_states
        return states[layers[0]] if len(layers) == 1 else torch.cat([states[i] for i in layers], dim=-1)


def _last_position(positions: Tensor) -> Tensor:
    """The position of each row's last prompt token, (1|B,); generate counts on from there, M-RoPE included.

    Raises ValueError when its M-RoPE rows (time, height, width) differ: the prompt ends inside an image or a video.
    """
    if positions.dim() == 2:
        return positions[:, -1]
    time, height, width = positions[-3:, :, -1]
    if not torch.equal(time, height) or not torch.equal(time, width):
        raise ValueError("input_ids: got a prompt that ends inside an image or a video, expected text after it")
    return time


HOOKING = threading.Lock()  # torch numbers hooks without one: two that are put up at once can be one


class _Watch:
    """What goes into a text decoder and comes out of it while the context is open, of any family: merged embeddings and
    positions, the last hidden state after the final norm. Other threads' calls of the same model are not seen.
    """

    def __init__(self, decoder):
        self.decoder, self.caller, self.seen = decoder, threading.get_ident(), {}

    def __enter__(self) -> dict[str, Any]:
        with HOOKING:
            self.hooks = [
                self.decoder.register_forward_pre_hook(self._entering, with_kwargs=True),
                self.decoder.register_forward_hook(self._leaving),
            ]
        return self.seen

    def __exit__(self, *error) -> None:
        with HOOKING:
            for hook in self.hooks:
                hook.remove()

    def _entering(self, module, args, kwargs=None) -> None:  # without, where another thread's hook is being removed
        if threading.get_ident() == self.caller:
            self.seen.update({k: kwargs.get(k) for k in ("inputs_embeds", "position_ids")})

    def _leaving(self, module, args, output) -> None:
        if threading.get_ident() == self.caller:
            self.seen["last_hidden_state"] = output.last_hidden_state


def describe(model: Any, features: tuple[int, ...] = ()) -> Capabilities:
    """What a loaded model can do, from its configuration. Raises ValueError for what can't be verified correctly."""
    config = model.config
    text = config.get_text_config()
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model: {name} is an encoder-decoder, expected a decoder that generates from its own prompt")
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"} or getattr(model, "_is_stateful", False):
        strange = ", ".join(sorted(kinds - {"full_attention", "sliding_attention"})) or "recurrent layers"
        raise ValueError(
            f"model: {name} has {strange}, expected full or sliding attention (rejected tokens could not be undone)"
        )
    attention = text._attn_implementation
    if attention not in ATTENTION_WITH_TREES:
        raise ValueError(
            f"attn_implementation: got {attention!r}, expected 'sdpa' or 'eager' or {tree_attention.NAME!r} (a draft"
            " needs its own mask)"
        )
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters or getattr(text, "alibi", False):
        raise ValueError(f"model: {name} reads positions off its mask, expected one that takes position_ids")
    depth = text.num_hidden_layers
    for index in features:
        if not -depth - 1 <= index <= depth:
            raise ValueError(f"features: got layer {index}, expected one of {-depth - 1}..{depth} ({name})")
    never = {getattr(c, key, None) for c in (config, text) for key in CONTENT_IDS}
    return Capabilities(
        vocab=model.get_output_embeddings().weight.shape[0],
        hidden=text.hidden_size,
        family=config.model_type,
        never_drafted=frozenset(i for i in never if isinstance(i, int)),
        feature_layers=tuple(features),
    )


def _sliding_window(text) -> int:
    """The window in tokens if any layer slides, else 0."""
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    if not slides and not getattr(text, "layer_types", None):
        slides = bool(getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None))
    return int(text.sliding_window) if slides and text.sliding_window else 0
