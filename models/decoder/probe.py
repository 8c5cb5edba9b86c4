"""Checks at wrap time, by running it, that a model supports tree attention and ragged batches.

A small branching draft after two rows of very different length goes through `HFDecoder.verify`; the same path goes
through the model alone, as a plain continuation of left-padded rows with transformers' own masks. The slots before the
draft are made up, keys and values that no pass computed, so that hundreds of slots cost little; an attention window
then reads different slots in the two passes, which shows in the logits. The probe takes two passes over a few tokens
and leaves the model unchanged. Windows longer than the tried slots (`LONG`, or more if the configuration names one) go
unnoticed.

Shapes: R rows, N nodes, P nodes on the path, S slots, V vocabulary, H heads, E head size.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from visspec import tree as trees
from visspec.cache import SlotCache
from visspec.distributions import categorical
from visspec.loop.decode import TokenBuffer
from visspec.models.attention import rotary
from visspec.models.attention.pass_inputs import HOOKING, MASK, SlotLayer, SlotLayers, StateSlotLayer
from visspec.models.attention.recurrent import state_layers
from visspec.types import Draft, Request, State

if TYPE_CHECKING:
    from visspec.models.decoder.target import HFDecoder

LOGGER = logging.getLogger(__name__)
PARENT, PATH = (-1, 0, 0, 2, 2, 4), (0, 2, 4, 5)  # the path's slots differ from its depths
SHORT, LONG, LONGEST = 5, 512, 8192  # slots before the draft: of the short row, of the long row, upper bound
BESIDE_WINDOW = 16
BEHIND_STATE = 8  # tokens read together and one by one after a state: some models only differ in later ones
EXPECTED = "a decoder of ids that attends by the mask and the positions it is given"
SPECIAL = ("pad", "bos", "eos")
FULL_PRECISION = (torch.float32, torch.float64)
# relative errors that may be rounding: in float32; with integer arithmetic; in half precision, as a multiple of the
# root's error, and at most
EXACT, COARSE, TIMES_ROOT, WRONG = 1e-3, 0.1, 10.0, 0.5
DRAWS = 4  # draws of made-up values in half precision; a fault shows with all of them
SEEN = 4.0  # changed media must move the logits by this multiple of the rounding
ROUGH = 1e-4  # an error of the root above this means that the arithmetic is coarse


class ProbeResult(NamedTuple):
    fault: str | None = None  # error message, if the model is not supported
    padding: bool = True  # whether left-padded rows continue as they would without padding
    error: float = 0.0  # difference between a node's logits in a draft and one by one, relative to their spread
    folds: bool = True  # whether its attention passes our keyword on (`draft_attention`)
    needs_mask: str = ""  # why it needs a mask instead of lengths and trees (`DraftLayout`)


_answers: dict[tuple, ProbeResult] = {}
_pads: dict[tuple, bool] = {}
_rows: dict[tuple, bool] = {}


def check(target: HFDecoder) -> ProbeResult:
    """Probe the model. Raises ValueError if it is not supported. Results are cached by the classes of its modules and
    its configuration.
    """
    model = target.model
    if target.device.type == "meta":
        return ProbeResult()  # nothing can be computed
    backend, key = target.masks.backend, _key(target)
    answer = _answers.get(key)
    if answer is None:
        with HOOKING, restore_after(model):  # one thread at a time, and no hooks may change meanwhile
            attn_metadata = backend.name != MASK
            answer = _probe(target)
            refused = answer.fault is not None or backend.name == MASK  # the pass itself may have failed
            if attn_metadata and refused:
                backend.refuse("different logits without a mask")
                answer = _probe(target)._replace(needs_mask=backend.why)
            if answer.fault is not None and target.masks.groups > 1:
                target.masks.groups = 1
                answer = _probe(target)._replace(folds=False, needs_mask=answer.needs_mask)
                LOGGER.info("%s: keys and values are repeated for query heads that share them", type(model).__name__)
            _answers[key] = answer
    if not answer.folds:
        target.masks.groups = 1
    if answer.needs_mask:
        backend.name, backend.why = MASK, answer.needs_mask
    if answer.fault is not None:
        raise ValueError(answer.fault)
    if answer.error > EXACT and model.dtype in FULL_PRECISION:
        warnings.warn(
            f"model: {type(model).__name__} computes a token's logits differently in a batch of nodes (by"
            f" {answer.error:.2g} of their spread), as quantized arithmetic may, so near-ties can fall differently.",
            RuntimeWarning,
            stacklevel=2,
        )
    return answer


def _key(target: HFDecoder) -> tuple:
    model, masks = target.model, target.masks
    parts = frozenset(map(type, model.modules()))  # quantized or wrapped modules may behave differently
    return parts, masks.groups, masks.backend.name, model.dtype, target.device.type, repr(model.config.to_dict())


def pads(target: HFDecoder) -> bool:
    """Return whether left-padded rows start and continue as each does alone, tested by six passes over a few tokens.
    Results are cached as in `check`.
    """
    key = _key(target)
    if key not in _pads:
        with HOOKING, torch.inference_mode(False), restore_after(target.model):
            draws = range(1 if _exact(target.model) else DRAWS)
            _pads[key] = any(_as_alone(target, draw) for draw in draws)
    return _pads[key]


def _as_alone(target: HFDecoder, draw: int = 0) -> bool:
    ids_1L, once = _tokens(target, draw), (len(PATH),)
    real_2L = torch.ones(2, ids_1L.shape[1], dtype=torch.long, device=target.device)
    real_2L[1, :2] = 0

    def prefill(ids_RL: Tensor, real_RL: Tensor) -> Tensor:
        inputs = {"attention_mask": real_RL, "use_cache": True, "logits_to_keep": 1}
        return categorical(target.prefill(Request(inputs, ids_RL, max_new_tokens=1))[1].distribution).logits

    try:
        pairs = (
            (prefill(ids_1L.repeat(2, 1), real_2L), [prefill(ids_1L[:, n:], real_2L[:1, n:]) for n in (0, 2)]),
            (_padded_passes(target, once, draw), [_alone(target, row, once, draw) for row in range(2)]),
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # it needs more than ids; assume the worst
        return False
    return all(alike(target, padded, torch.cat(alone)) for padded, alone in pairs)


def joins(
    target: HFDecoder, batch: Callable[[Sequence[Request]], Request], first: Request, second: Request, changed: Request
) -> bool | None:
    """Check that two rows with concatenated media are read as each is alone.

    The second row of the batch has changed media, so that a model that mixes up the rows gives different logits even if
    both rows show the same image.

    Args:
        batch: Builds one request from requests of one row.
        changed: The second request with other media of the same shapes (`reflect`).

    Returns:
        None if the change moves the logits by little more than rounding, which makes the test inconclusive.

    Raises:
        Exception: Whatever the model raises for a row alone.
    """

    def logits(*rows: Request) -> Tensor:
        return target.prefill(replace(batch(rows), keep_raw=True))[1].aux["raw"].float()

    one, other, control = logits(first), logits(changed), logits(second)
    try:
        joined = logits(first, changed)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:
        return False
    if not alike(target, joined, torch.cat([one, other])):
        return False
    floating = any(isinstance(v, Tensor) and v.is_floating_point() for v in changed.inputs.values())
    exact = _exact(target.model)
    error, change = (_difference(logits_RPV, other, exact)[0] for logits_RPV in (joined[1:], control))
    return True if not floating or SEEN * error <= change > 0 else None


def reflect(values: Tensor) -> Tensor:
    """Mirror floating-point values within the range of each column, so that columns of coordinates stay valid."""
    if not values.is_floating_point() or not values.numel() or values.dim() < 2:
        return values
    flat = values.flatten(0, -2)
    return flat.amin(0) + flat.amax(0) - values


def alike(target: HFDecoder, found_RPV: Tensor, expected_RPV: Tensor) -> bool:
    """Return whether distributions are equal up to rounding."""
    exact = _exact(target.model)
    limit = EXACT if exact and target.rounding <= EXACT else COARSE
    return _difference(found_RPV.float(), expected_RPV.float(), exact)[0] <= limit


def _probe(target: HFDecoder) -> ProbeResult:
    name = type(target.model).__name__
    exact, error = _exact(target.model), 0.0
    try:
        if target.states:  # several tokens after a state must equal the same tokens one by one
            together, apart = _alone(target, 0, (1, BEHIND_STATE)), _alone(target, 0, (1,) * (1 + BEHIND_STATE))
            error, limit = _difference(together, apart, exact)
            if error > limit:
                return ProbeResult(_unlike(name, error))
        # try other references only if the first differs: models whose prompt is bidirectional are causal only stepwise
        # a trained model amplifies half precision's rounding at some made-up values, so others are drawn
        once, one_by_one, trees_RPV = (len(PATH),), (1,) * len(PATH), dict[int, Tensor]()
        for widths, padding in ((once, True), (one_by_one, True), (one_by_one, False)):
            for draw in range(1 if exact else DRAWS):
                if draw not in trees_RPV:
                    trees_RPV[draw] = _in_a_draft(target, draw=draw)
                if padding:
                    path_RPV = _padded_passes(target, widths, draw)
                else:
                    path_RPV = torch.cat([_alone(target, row, widths, draw) for row in range(2)])
                error, limit = _difference(trees_RPV[draw], path_RPV, exact)
                if error <= limit:
                    return ProbeResult(padding=padding, error=error)
    except (MemoryError, torch.OutOfMemoryError):
        raise  # unrelated to the model's structure
    except Exception as raised:
        message = str(raised).split("\n")[0].replace(". ", ", ").rstrip(".")
        if message.startswith("model: "):
            return ProbeResult(message)  # our own cache found the fault
        return ProbeResult(f"model: {name} can't run a draft ({type(raised).__name__}: {message}), expected {EXPECTED}")
    return ProbeResult(_unlike(name, error))


def _unlike(name: str, error: float) -> str:
    return (
        f"model: {name} gives different logits for a draft than for the same tokens one by one (by {error:.2g} of their"
        f" spread), expected {EXPECTED}"
    )


def _exact(model: PreTrainedModel) -> bool:
    """Return whether the model computes in float32 or better, judged by its dtype."""
    return model.dtype in FULL_PRECISION and not getattr(model, "is_quantized", False)


def _difference(tree_RPV: Tensor, path_RPV: Tensor, exact: bool) -> tuple[float, float]:
    """Return the largest difference of logits relative to their spread, and the largest that rounding explains."""
    if not bool(path_RPV.isfinite().all()):
        return 0.0, 0.0  # weights that give NaN or inf say nothing about the structure
    spread_RP = (path_RPV - path_RPV.mean(dim=-1, keepdim=True)).norm(dim=-1)
    error_RP = (tree_RPV - path_RPV).norm(dim=-1) / spread_RP.clamp(min=torch.finfo(torch.float32).tiny)
    root = float(error_RP[0, 0])
    # in coarse arithmetic single nodes may be far off (an expert chosen by a hair), but not most nodes of a row
    coarse = root > ROUGH or not exact
    error = error_RP.median(dim=-1).values.max() if coarse else error_RP.max()
    if exact:
        return float(error), COARSE if coarse else EXACT
    return float(error), min(max(TIMES_ROOT * root, COARSE), WRONG)


class _RandomSlots(SlotCache):
    """Slots with zero keys and random values, created for one layer at a time to save memory."""

    def __init__(self, values_RSE: Tensor, lengths: list[int]):
        super().__init__(len(values_RSE))
        self.made_up, self.lengths = values_RSE, lengths
        self.steps: dict[int, list[tuple[Tensor, Tensor]]] = {}  # keys and values of earlier passes, by layer

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rows, heads, _, size = value.shape
        self.keys = [key.new_zeros(*key.shape[:2], self._extent, key.shape[-1])]
        self.values = [value.new_zeros(rows, heads, self._extent, size)]
        filler = self.made_up[:, None, : self._extent].to(value)
        for first in range(0, size, filler.shape[-1]):
            width = min(size - first, filler.shape[-1])
            self.values[0][:, :, : filler.shape[2], first : first + width] = filler[..., :width]
        for n, (earlier_key, earlier_value) in enumerate(steps := self.steps.setdefault(layer, []), filler.shape[2]):
            self.keys[0][:, :, n], self.values[0][:, :, n] = earlier_key[:, :, 0], earlier_value[:, :, 0]
        steps.append((key, value))
        return super().write(0, key, value)


def _values(target: HFDecoder, draw: int = 0) -> Tensor:
    """Return made-up values of a long and a short row, each from its first slot on: (2, S, 64)."""
    text = target.model.config.get_text_config()
    named = [v + BESIDE_WINDOW for k, v in text.to_dict().items() if "window" in k and type(v) is int]
    room = getattr(text, "max_position_embeddings", None) or LONGEST
    long = max(min(max([LONG, *named]), LONGEST, room - len(PARENT)), SHORT + 1)
    values_RSE = torch.randn(2, long, 64, generator=torch.Generator().manual_seed(draw))
    values_RSE[0] *= long**0.5  # makes the mean over many values as large as that over few
    return values_RSE


class _StockLayer(SlotLayer):
    """A layer that returns no more than its window, if it has one, like those of transformers' own cache."""

    def __init__(self, slots: SlotCache, index: int, window: int):
        super().__init__(slots, index)
        self.window, self.is_sliding = window, window > 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        visible = min(self.slots.length, self.window - 1) if self.window else self.slots.length
        return visible + query_length, self.slots.length - visible


class _StockSlots(SlotLayers):
    """Made-up slots behind the interface of transformers' own cache."""

    def __init__(self, windows: dict[int, int], slots: _RandomSlots, states: dict[int, Any]):
        super().__init__(len(slots.lengths))
        self.slots = slots
        count = max([*windows, *states]) + 1
        both = {i: StateSlotLayer(slots, i, states[i].number_of_states) for i in states if i in windows}
        own = {**states, **both}
        self.layers = [own.get(i) or _StockLayer(slots, i, windows.get(i, 0)) for i in range(count)]

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        pair = super().update(key_states, value_states, layer_idx)
        layer = self.layers[layer_idx]
        assert isinstance(layer, SlotLayer)
        visible = layer.get_mask_sizes(key_states.shape[2])[0]
        return tuple(states[:, :, -visible:] for states in pair)


def _tokens(target: HFDecoder, draw: int = 0) -> Tensor:
    """Return ordinary ids for the draft's nodes, (1, N)."""
    text = target.model.config.get_text_config()
    special = target.capabilities.never_drafted | {getattr(text, f"{name}_token_id", None) for name in SPECIAL}
    ordinary = [i for i in range(target.capabilities.vocab) if i not in special]
    size = len(_shape(target)[0])
    return torch.tensor([[ordinary[(size * draw + n) % len(ordinary)] for n in range(size)]], device=target.device)


def check_rows(target: HFDecoder) -> None:
    """Raise ValueError unless a row's logits equal, bit for bit, those it has alone and in a pass over more nodes.

    This takes three passes, cached as in `check`, and finds what `PassWidths` does not model.
    """
    key = *_key(target), torch.get_num_threads()
    if key not in _rows:
        with HOOKING, torch.inference_mode(False), restore_after(target.model):
            both_RPV, short_RPV = _in_a_draft(target, chain=True), _in_a_draft(target, chain=True, rows=[SHORT])
            one_RPV = _in_a_draft(target, chain=True, rows=[SHORT], nodes=1)
            _rows[key] = torch.equal(both_RPV[1:], short_RPV) and torch.equal(short_RPV[:, :1], one_RPV)
    if not _rows[key]:
        raise ValueError(
            f"batch_invariant: the logits of {type(target.model).__name__} depend on other rows and nodes of a pass."
            " Leave batch_invariant out."
        )


def _in_a_draft(
    target: HFDecoder,
    chain: bool = False,
    rows: Sequence[int] = (LONG, SHORT),
    nodes: int = len(PARENT),
    draw: int = 0,
) -> Tensor:
    """Return logits (R, P, V) of the path's nodes, from a pass over the tree, or over the path alone as a chain.

    Args:
        rows: The long row, the short one, or both.
        nodes: Maximum number of nodes of the chain.
    """
    parent, path = _shape(target)
    tokens_RN = _tokens(target).repeat(len(rows), 1)
    if chain:
        path = path[:nodes]
        tokens_RN, parent, path = tokens_RN[:, path], tuple(range(-1, len(path) - 1)), tuple(range(len(path)))
    tree = trees.static(parent, str(target.device))
    request = Request(inputs={}, prompt=tokens_RN[:, :1], max_new_tokens=len(PARENT))
    values_RSE = _values(target, draw)[-len(rows) :]
    cache = target.cache(len(rows))
    cache.slots = _RandomSlots(values_RSE, [values_RSE.shape[1], SHORT][-len(rows) :])
    cache.slots.extents = None if target.widths is None else target.widths.extent
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            layer.slots = cache.slots
    count = len(rows)
    position = torch.full((count,), SHORT, device=target.device)
    state = State(request, tokens_RN[:, 0], position, cache, list(range(count)), TokenBuffer(request, count))
    logits_RNV = categorical(target.verify(state, Draft(tokens_RN, tree)).distribution).logits
    cache.check_written(target.model, target.cached)
    return logits_RNV[:, path]


def _shape(target: HFDecoder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the draft's parents and the path in it; for targets without trees, a chain of the same length."""
    if target.capabilities.trees:
        return PARENT, PATH
    return tuple(range(-1, len(PATH) - 1)), tuple(range(len(PATH)))


def _padded_passes(target: HFDecoder, widths: tuple[int, ...], draw: int = 0) -> Tensor:
    """Return the path's logits (R, P, V) without siblings, `widths` tokens per pass, with the short row left-padded."""
    values_RSE = _values(target, draw)
    long = values_RSE.shape[1]
    values_RSE[1] = values_RSE[1].roll(-SHORT, 0)
    real_RS = torch.ones(2, long + len(PATH), dtype=torch.long, device=target.device)
    real_RS[1, : long - SHORT] = 0
    return _plain_continuation(target, _RandomSlots(values_RSE, [long, long]), widths, real_RS)


def _alone(target: HFDecoder, row: int, widths: tuple[int, ...], draw: int = 0) -> Tensor:
    """Return the path's logits (1, P, V) of one row by itself."""
    length = [None, SHORT][row]
    values_RSE = _values(target, draw)[row : row + 1, :length]
    return _plain_continuation(target, _RandomSlots(values_RSE, [values_RSE.shape[1]]), widths)


def _plain_continuation(
    target: HFDecoder, slots: _RandomSlots, widths: tuple[int, ...], real_RS: Tensor | None = None
) -> Tensor:
    """Return logits of the path as a plain continuation with transformers' own mask."""
    rows, size, prefix = len(slots.lengths), sum(widths), slots.length
    cache = _StockSlots(target.cached, slots, state_layers(target.model.config) if target.states else {})
    ids_RP = _tokens(target)[:, _shape(target)[1]].repeat(rows, -(-size // len(PATH)))[:, :size]
    position_RP = (SHORT + torch.arange(size, device=target.device)).repeat(rows, 1)
    logits = []
    for first, step in zip(accumulate(widths, initial=0), widths):
        slots.open(step, target.device)
        output = target.model(
            input_ids=ids_RP[:, first : first + step],
            attention_mask=None if real_RS is None else real_RS[:, : prefix + first + step],
            position_ids=position_RP[:, first : first + step],
            use_cache=True,
            return_dict=True,
            **{target.cache_name: cache},
        )
        slots.lengths = [n + step for n in slots.lengths]
        logits.append(output.logits.float())
    return torch.cat(logits, dim=1)


@contextmanager
def restore_after(model: nn.Module) -> Iterator[None]:
    """Run the model in inference mode and restore everything after: modes, buffers, hooks, random number generators."""
    entries = [vars(module) for module in model.modules()]
    # some models install hooks at their first pass
    entries += [x for own in entries for name, x in own.items() if name == "_buffers" or name.startswith("_forward_")]
    snapshots = [(now, dict(now)) for now in entries]
    inner = [(buffer, buffer.clone()) for module in rotary.modules(model) for buffer in module.buffers()]
    devices = [] if model.device.type != "cuda" else [model.device]
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices):
            if any(module.training for module in model.modules()):
                model.eval()
            yield
    finally:
        for now, old in snapshots:
            for name in now.keys() - old.keys():
                del now[name]
            for name, value in old.items():
                if now.get(name, now) is not value:  # skip unchanged entries: other threads may run the model
                    now[name] = value
        with torch.no_grad():
            for buffer, values in inner:  # some models update them in place
                buffer.copy_(values)
