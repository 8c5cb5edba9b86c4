"""Passes whose rows are computed alike whatever runs beside them (`batch_invariant=True`).

In half precision near ties are common, and what rounds differently in another pass gives other tokens. A row of a pass
depends on the pass in three ways, and each is fixed here or where it is named:

* Products. A matrix product may sum along its inner dimension in another order for another number of rows, but never
  for other values in the other rows, nor for another place. So a pass is padded to a number of rows whose products
  agree bit for bit with those of `REFERENCE` rows (`PassWidths`).
* Attention. Its sums run over keys, in blocks that depend on the number of keys: on a CPU blocks of 512, the last of
  which is split once more, of 384 as of 512 but not of 256. Masked keys have the weight 0, and adding 0 changes no
  sum, so a pass sees a multiple of `STEP` keys that is split as longer ones are (`PassWidths.extent`). The number of
  queries is a number of rows as above.
* Prompts are prefilled one at a time (`models.decoder.invariant`): what they give depends on the prompt alone.

Which numbers agree depends on device, dtype, threads and the libraries behind torch, so it is measured: when a number
is first used, a few milliseconds for each shape of weights, kept for the process. The numbers that are multiplied
cancel to zero, so that results are nothing but rounding errors: an equal result means an equal order of sums. Random
numbers would hide most differences, because bfloat16 rounds all but one in some thousands away.
Shapes: B rows, N nodes, M = B N rows of a product, G query heads per key head, S slots, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visspec import tree as trees
from visspec.models.attention.draft_attention import folded_attention
from visspec.types import Draft

STEP = 128  # slots
REFERENCE = 16  # rows whose results others are compared with
WIDER = 64  # rows that a pass is padded with at most, for each row of the batch
OUTPUTS = 2048  # columns of a product that are compared on a CPU, where random numbers take time
BLOCK = 4 * STEP  # keys of a CPU's block
EXTENTS = (STEP, 3 * STEP, BLOCK, BLOCK + STEP)  # at which numbers of queries are compared
SAMPLES = 4  # different rows in a check
LARGE = 2.0**11
_known: dict[Hashable, Any] = {}  # references, and whether other sizes agree with them


class PassWidths:
    """Numbers of nodes that passes of a network may have.

    Args:
        modules: The networks that a pass goes through.
        heads: Key heads, query heads per key head and head size of its attention, of each kind of layer.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        heads: list[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        parts = [part for root in modules for part in root.modules()]
        linear = {(*shape, part.bias is not None) for part in parts if (shape := _shape(part)) is not None}
        self.products, self.heads, self.dtype, self.device = sorted(linear), heads, dtype, device
        self._found: dict[tuple[int, int, int], int | None] = {}
        self._extents: dict[tuple[int, int], int] = {}

    def nodes(self, rows: int, nodes: int) -> int:
        """The least number of nodes, of at least so many, that passes of so many rows may have.

        Raises:
            ValueError: No number up to `WIDER` more does.
        """
        key = rows, nodes, torch.get_num_threads()
        if key not in self._found:
            numbers = range(nodes, nodes + WIDER + 1)
            with torch.inference_mode():
                self._found[key] = next((n for n in numbers if self._agrees(rows * n) and self._attends(n)), None)
        if (found := self._found[key]) is None:
            raise ValueError(
                f"batch_invariant: found no width for {rows} rows of {nodes} nodes at which {self.dtype} products on"
                f" {self.device.type} agree, so leave it out here"
            )
        return found

    def extent(self, slots: int) -> int:
        """The least number of slots, of at least so many, that passes may attend to.

        Raises:
            ValueError: No multiple of `STEP` up to a block more is.
        """
        first = -(-slots // STEP) * STEP
        key = first, torch.get_num_threads()
        if key not in self._extents:
            with torch.inference_mode():
                found = next((n for n in range(first, first + BLOCK, STEP) if self._splits(n)), None)
            if found is None:
                raise ValueError(
                    f"batch_invariant: found no number of keys above {slots} at which {self.dtype} attention on"
                    f" {self.device.type} agrees, so leave it out here"
                )
            self._extents[key] = found
        return self._extents[key]

    def pad(self, draft: Draft, times: int = 1) -> Draft:
        """A chain with nodes behind it that nothing reads. times: cache rows of each row."""
        rows, size = draft.value.shape[:2]
        if (width := self.nodes(times * rows, size)) == size:
            return draft
        more = draft.value[:, -1:].expand(-1, width - size, *draft.value.shape[2:])
        return Draft(torch.cat([draft.value, more], dim=1), trees.chain(width - 1, str(draft.value.device)))

    def _agrees(self, rows: int) -> bool:
        return all(self._compare((*shape, rows), (*shape, REFERENCE), _product) for shape in self.products)

    def _attends(self, nodes: int) -> bool:
        sizes = [(*heads, extent - REFERENCE, extent) for heads in self.heads for extent in EXTENTS]
        return all(self._compare((*each, nodes), (*each, REFERENCE), _attention) for each in sizes)

    def _splits(self, extent: int) -> bool:
        """Whether sums over keys are split as those of the next whole block are."""
        seen, whole = extent - REFERENCE, (extent // BLOCK + 1) * BLOCK
        return all(
            self._compare((*heads, seen, extent, REFERENCE), (*heads, seen, whole, REFERENCE), _attention)
            for heads in self.heads
        )

    def _compare(self, of: tuple[int, ...], same: tuple[int, ...], function: Callable[..., Tensor]) -> bool:
        """Whether two sizes give the same; the last of each is a number of rows."""
        where = function, self.dtype, str(self.device), torch.get_num_threads()
        if of == same:
            return True
        if (key := (*where, of, same)) not in _known:
            if (*where, same) not in _known:
                _known[*where, same] = function(same, self.dtype, self.device)[:SAMPLES].clone()
            found = function(of, self.dtype, self.device)
            _known[key] = torch.equal(found, _tiled(_known[*where, same], len(found)))
        return _known[key]


def _shape(module: nn.Module) -> tuple[int, int, bool] | None:
    """Inner and outer size of a module's product, and whether its weight is (inner, outer); None of other modules."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        return weight.shape[1], weight.shape[0], False
    return (*weight.shape, True) if type(module).__name__ == "Conv1D" else None


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _tiled(values: Tensor, rows: int) -> Tensor:
    """The same rows over and over."""
    return values[torch.arange(rows, device=values.device) % len(values)]


def _product(of: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(rows, outer) products that are zero but for rounding: each term is there twice, of either sign."""
    inner, outer, turned, bias, rows = of
    outer = min(outer, OUTPUTS) if device.type == "cpu" else outer
    order = _random(inner).argsort()
    weight, x = _random(64, (inner + 1) // 2), _random(SAMPLES, (inner + 1) // 2)
    weight = _tiled(torch.cat([weight, weight], dim=1)[:, order].to(device, dtype), outer)
    x = _tiled(torch.cat([x, -x], dim=1)[:, order].to(device, dtype), rows)
    added = torch.zeros(outer, dtype=dtype, device=device) if bias else None
    if not turned:
        return F.linear(x[None], weight, added)[0]
    return torch.addmm(torch.zeros(outer, dtype=dtype, device=device), x, weight.T.contiguous())


def _attention(of: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(nodes, keys * groups * size) results of attention, which are zero but for rounding: each key is there twice,
    with values of either sign. Only the first keys, `seen`, are not masked.
    """
    keys, groups, size, seen, extent, nodes = of
    pairs = (size + 1) // 2
    order_S, order_E = _random(seen).argsort(), _random(2 * pairs).argsort()
    key, value = torch.zeros(2, 1, keys, extent, size)
    # scores cancel as well: of numbers this large, with rounding errors that softmax shows
    half_key, half_query = LARGE * _random(keys, seen // 2, pairs), LARGE * _random(SAMPLES, keys * groups, pairs)
    half_value = _random(keys, seen // 2, size)
    key[0, :, :seen] = half_key.repeat(1, 2, 2)[:, order_S][..., order_E][..., :size]
    value[0, :, :seen] = torch.cat([half_value, -half_value], dim=1)[:, order_S]
    query = torch.cat([half_query, -half_query], dim=-1)[..., order_E][..., :size]
    query = _tiled(query, nodes).transpose(0, 1)[None]
    query, key, value = (x.to(device, dtype) for x in (query, key, value))
    mask = torch.full((1, 1, groups * nodes, extent), torch.finfo(dtype).min, dtype=dtype, device=device)
    mask[..., :seen] = 0
    if groups > 1:
        out = folded_attention(query, key, value, mask, None)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    return out.reshape(nodes, -1)
