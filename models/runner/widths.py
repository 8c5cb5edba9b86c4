"""Passes whose rows are computed alike whatever else is in the batch (`batch_invariant=True`).

In half precision near-ties are common, and different rounding in another pass gives different tokens. A row's result
depends on the rest of the pass in three ways, each of which is fixed here or in the named module:

* Products. A matrix product may sum along its inner dimension in another order for another number of rows, but not for
  other values in the other rows or for another place. So a pass is padded to a number of rows whose products agree bit
  for bit with those of `REFERENCE` rows (`PassWidths.pad`). Larger products that don't agree, as those of more than 32
  rows in bfloat16 on CPUs with AMX, are computed in parts (`PassWidths.in_parts`).
* Attention. Its sums run over keys, in blocks that depend on the number of keys: on a CPU in blocks of 512, the last of
  which is split once more for 384 and 512 keys but not for 256. Masked keys have weight 0, and adding 0 changes no sum,
  so a pass sees a multiple of `STEP` keys that is split like longer ones (`PassWidths.extent`). The number of queries
  is a number of rows as above.
* Prompts are prefilled one at a time (`models.decoder.invariant`), so that results depend on the prompt alone.

Which numbers agree depends on device, dtype, threads and the libraries that torch uses, so it is measured at first use:
a few milliseconds for each shape of weights, cached for the process. The test inputs cancel to zero, so that results
consist only of rounding errors: an equal result means an equal order of sums. Random inputs would hide most
differences, because bfloat16 rounds away all but one in a few thousand.
Shapes: B rows, N nodes, M = B N rows of a product, G query heads per key head, S slots, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from visspec import tree as trees
from visspec.models.attention.draft_attention import folded_attention
from visspec.types import Draft

STEP = 128  # slots
REFERENCE = 16  # number of rows whose results are the reference
WIDER = 64  # maximum padding of a pass, for each row of the batch
OUTPUTS = 2048  # columns of a product to compare on a CPU, where random numbers take time
BLOCK = 4 * STEP  # keys in a block of the CPU's attention
EXTENTS = (STEP, 3 * STEP, BLOCK, BLOCK + STEP)  # numbers of keys for comparing numbers of queries
PARTS = (4 * REFERENCE, 2 * REFERENCE, REFERENCE)  # numbers of rows that larger products are split into
SAMPLES = 4  # different rows in a check
LARGE = 2.0**11
_known: dict[Hashable, Any] = {}  # reference results, and whether other sizes agree with them


class PassWidths:
    """Numbers of nodes that passes of a network may have.

    Args:
        modules: The networks that a pass goes through.
        heads: Key heads, query heads per key head and head size of its attention, for each layer type.
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
        self._parts: dict[tuple[int, int], int] = {}

    def nodes(self, rows: int, nodes: int) -> int:
        """Return the smallest allowed number of nodes, at least `nodes`, for passes over `rows` rows.

        Raises:
            ValueError: There is none within `WIDER` more.
        """
        key = rows, nodes, torch.get_num_threads()
        if key not in self._found:
            numbers = range(nodes, nodes + WIDER + 1)
            with torch.inference_mode():
                self._found[key] = next((n for n in numbers if self._fits(rows * n) and self._attends(n)), None)
        if (width := self._found[key]) is None:
            raise ValueError(
                f"batch_invariant: found no width for {rows} rows of {nodes} nodes at which {self.dtype} passes on"
                f" {self.device.type} agree. Leave batch_invariant out."
            )
        return width

    def extent(self, slots: int) -> int:
        """Return the smallest allowed number of slots, at least `slots`, for passes to attend to.

        Raises:
            ValueError: There is none within one block more.
        """
        first = -(-slots // STEP) * STEP
        key = first, torch.get_num_threads()
        if key not in self._extents:
            with torch.inference_mode():
                result = next((n for n in range(first, first + BLOCK, STEP) if self._splits(n)), None)
            if result is None:
                raise ValueError(
                    f"batch_invariant: found no number of keys above {slots} at which {self.dtype} attention on"
                    f" {self.device.type} agrees. Leave batch_invariant out."
                )
            self._extents[key] = result
        return self._extents[key]

    def pad(self, draft: Draft, times: int = 1) -> Draft:
        """Append nodes that nothing reads to a chain.

        Args:
            times: Number of cache rows per row.
        """
        rows, size = draft.value.shape[:2]
        if (width := self.nodes(times * rows, size)) == size:
            return draft
        more = draft.value[:, -1:].expand(-1, width - size, *draft.value.shape[2:])
        return Draft(torch.cat([draft.value, more], dim=1), trees.chain(width - 1, str(draft.value.device)))

    def part(self, rows: int) -> int:
        """Return the number of rows of a product to compute at once, at most `rows`: all of them if they agree."""
        key = rows, torch.get_num_threads()
        if key not in self._parts:
            with torch.inference_mode():
                self._parts[key] = next((n for n in (rows, *PARTS) if n <= rows and self._agrees(n)), rows)
        return self._parts[key]

    def in_parts(self, rows: int) -> AbstractContextManager[object]:
        """Return a context for a pass whose products have `rows` rows, in which they agree with those of fewer rows."""
        return nullcontext() if (most := self.part(rows)) == rows else ProductsInParts(most)

    def _fits(self, rows: int) -> bool:
        """Return whether products of so many rows agree, or are large enough to be computed in parts."""
        return rows >= 2 * REFERENCE or self._agrees(rows)

    def _agrees(self, rows: int) -> bool:
        return all(self._compare((*shape, rows), (*shape, REFERENCE), _product) for shape in self.products)

    def _attends(self, nodes: int) -> bool:
        sizes = [(*heads, extent - REFERENCE, extent) for heads in self.heads for extent in EXTENTS]
        return all(self._compare((*each, nodes), (*each, REFERENCE), _attention) for each in sizes)

    def _splits(self, extent: int) -> bool:
        """Return whether sums over keys are split like those of the next whole block."""
        visible, whole = extent - REFERENCE, (extent // BLOCK + 1) * BLOCK
        return all(
            self._compare((*heads, visible, extent, REFERENCE), (*heads, visible, whole, REFERENCE), _attention)
            for heads in self.heads
        )

    def _compare(self, of: tuple[int, ...], same: tuple[int, ...], function: Callable[..., Tensor]) -> bool:
        """Return whether two sizes give the same result; the last entry of each is a number of rows."""
        where = function, self.dtype, str(self.device), torch.get_num_threads()
        if of == same:
            return True
        if (key := (*where, of, same)) not in _known:
            if (*where, same) not in _known:
                _known[*where, same] = function(same, self.dtype, self.device)[:SAMPLES].clone()
            result = function(of, self.dtype, self.device)
            _known[key] = torch.equal(result, _tile(_known[*where, same], len(result)))
        return _known[key]


class ProductsInParts(TorchFunctionMode):
    """Computes the products of linear layers with at most `most` rows at once. The last rows are computed together with
    rows before them, because fewer rows may not agree.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear and (x := args[0]).numel() > self.most * x.shape[-1]:
            parts = self._parts(x.flatten(0, -2), lambda rows: function(rows, *args[1:], **kwargs))
            return parts.view(*x.shape[:-1], -1)
        if function is torch.addmm and len(args[1]) > self.most and args[0].dim() == 1:
            return self._parts(args[1], lambda rows: function(args[0], rows, *args[2:], **kwargs))
        return function(*args, **kwargs)

    def _parts(self, rows_MX: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        whole, most = len(rows_MX), self.most
        parts = [product(rows_MX[i : i + most]) for i in range(0, whole - most + 1, most)]
        rest = whole % most
        return torch.cat([*parts, product(rows_MX[-most:])[most - rest :]] if rest else parts)


def _shape(module: nn.Module) -> tuple[int, int, bool] | None:
    """Return inner and outer size of a module's product, and whether its weight is (inner, outer); or None."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        return weight.shape[1], weight.shape[0], False
    return (*weight.shape, True) if type(module).__name__ == "Conv1D" else None


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _tile(values: Tensor, rows: int) -> Tensor:
    """Repeat the rows cyclically to `rows` rows."""
    return values[torch.arange(rows, device=values.device) % len(values)]


def _product(of: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Compute (rows, outer) products that are zero but for rounding: each term occurs twice, with opposite signs."""
    inner, outer, turned, bias, rows = of
    outer = min(outer, OUTPUTS) if device.type == "cpu" else outer
    order = _random(inner).argsort()
    weight, x = _random(64, (inner + 1) // 2), _random(SAMPLES, (inner + 1) // 2)
    weight = _tile(torch.cat([weight, weight], dim=1)[:, order].to(device, dtype), outer)
    x = _tile(torch.cat([x, -x], dim=1)[:, order].to(device, dtype), rows)
    added = torch.zeros(outer, dtype=dtype, device=device) if bias else None
    if not turned:
        return F.linear(x[None], weight, added)[0]
    return torch.addmm(torch.zeros(outer, dtype=dtype, device=device), x, weight.T.contiguous())


def _attention(of: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Compute attention (nodes, keys * groups * size) that is zero but for rounding: each key occurs twice, with values
    of opposite signs. Only the first `visible` keys are not masked.
    """
    keys, groups, size, visible, extent, nodes = of
    pairs = (size + 1) // 2
    order_S, order_E = _random(visible).argsort(), _random(2 * pairs).argsort()
    key, value = torch.zeros(2, 1, keys, extent, size)
    # scores cancel too: large numbers make their rounding errors visible after the softmax
    half_key, half_query = LARGE * _random(keys, visible // 2, pairs), LARGE * _random(SAMPLES, keys * groups, pairs)
    half_value = _random(keys, visible // 2, size)
    key[0, :, :visible] = half_key.repeat(1, 2, 2)[:, order_S][..., order_E][..., :size]
    value[0, :, :visible] = torch.cat([half_value, -half_value], dim=1)[:, order_S]
    query = torch.cat([half_query, -half_query], dim=-1)[..., order_E][..., :size]
    query = _tile(query, nodes).transpose(0, 1)[None]
    query, key, value = (x.to(device, dtype) for x in (query, key, value))
    mask = torch.full((1, 1, groups * nodes, extent), torch.finfo(dtype).min, dtype=dtype, device=device)
    mask[..., :visible] = 0
    if groups > 1:
        out = folded_attention(query, key, value, mask, None)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    return out.reshape(nodes, -1)
