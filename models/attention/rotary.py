"""Rotary frequencies that depend on how far a pass reaches: each node gets those of its own step.

RoPE of the kinds `dynamic` and `longrope` picks its frequencies by the largest position of a pass, so a drafted node
would turn the nodes before it, and one row those beside it. Step by step, transformers' generate gives token t of every
row the frequencies of t steps behind the longest prompt; a hook on the stock module gives them to each node of a draft.
It works on copies of the module, which itself remembers the longest pass of whoever used it last. *Reach* is the number
of positions up to the largest one. Shapes: B rows, N nodes, L prompt, E rotated size.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from visspec.models.attention.hooks import ModuleHooks

Rope = Tensor | tuple[Tensor, ...]  # one complex tensor, or cosines and sines


def modules(model: nn.Module) -> list[nn.Module]:
    """The rotary modules of a model whose frequencies depend on the reach."""
    return [module for module in model.modules() if _depends(getattr(module, "rope_type", None))]


def _depends(kind: object) -> bool:
    kinds = kind.values() if isinstance(kind, dict) else [kind]  # some models have a kind for each type of layer
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)


class _RopeHook(ModuleHooks):
    """Replaces what the modules return while the context is open, for calls of this thread."""

    def __init__(self, modules: list[nn.Module]):
        super().__init__()
        self.modules = modules

    def _put_up(self):
        return [module.register_forward_hook(self._leaving, with_kwargs=True) for module in self.modules]

    def _leaving(self, module, args, kwargs, output=None):
        if not self.calling:
            return None
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        given.pop("self")
        if given.get("position_ids") is None:
            return None
        return self._replace(_InitialRope(module, given), given["position_ids"], output)

    def _replace(self, fresh: _InitialRope, position_ids: Tensor, output: Rope) -> Rope:
        raise NotImplementedError


class PrefillRope(_RopeHook):
    """For a prefill: frequencies as in a model just loaded. `moves` then says whether those of a request of up to
    `new` more tokens depend on the reach.
    """

    def __init__(self, modules: list[nn.Module], new: int):
        super().__init__(modules)
        self.new, self.moves = new, False

    def _replace(self, fresh, position_ids, output):
        newest = position_ids[..., -1]
        shortest, longest = int(newest.min()) + 1, int(newest.max()) + 1
        probe = position_ids.new_ones(1, 1).expand(*position_ids.shape[:-2], 1, 1)
        ends = [_parts(fresh.reaching(probe, reach)) for reach in (max(shortest, 2), longest + self.new + 1)]
        self.moves |= not all(torch.equal(first, last) for first, last in zip(*ends))
        return fresh.again()(position_ids)


class DraftRope(_RopeHook):
    """For a pass over nodes of known reach, (B, N), between `low` and `high`."""

    def __init__(self, modules: list[nn.Module], reach_BN: Tensor, low: int, high: int):
        super().__init__(modules)
        self.reach_BN, self.low, self.high = reach_BN, low, high

    def _replace(self, fresh, position_ids, output):
        parts = _parts(output)
        for reach in range(self.low, self.high + 1):
            own = (self.reach_BN == reach)[..., None]
            parts = [torch.where(own, new, old) for new, old in zip(_parts(fresh.reaching(position_ids, reach)), parts)]
        return tuple(parts) if isinstance(output, tuple) else parts[0]


class _InitialRope:
    """A copy of a rotary module as it was before its first pass, and the arguments of a call of it."""

    def __init__(self, module: nn.Module, given: dict[str, Any]):
        self.module, self.given = module, given
        self.again()

    def again(self) -> _InitialRope:
        self.copy = copy.copy(self.module)
        buffers = self.module._buffers.items()  # None stands for one that a module has only sometimes
        self.copy._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers}
        self(self.given["position_ids"][..., :1] * 0)  # a short pass makes it forget the long ones
        return self

    def __call__(self, position_ids: Tensor) -> Rope:
        return type(self.module).forward(self.copy, **{**self.given, "position_ids": position_ids})

    def reaching(self, position_ids: Tensor, reach: int) -> Rope:
        """What a pass of this reach gives at the positions. Called with growing reaches."""
        last = torch.full_like(position_ids[..., :1], reach - 1)
        output = self(torch.cat([position_ids.clamp(max=reach - 1), last], dim=-1))
        parts = [part[..., :-1, :] for part in _parts(output)]
        return tuple(parts) if isinstance(output, tuple) else parts[0]


def _parts(output: Rope) -> list[Tensor]:
    """Cosines and sines (..., N, E), or one complex tensor of both."""
    return list(output) if isinstance(output, tuple) else [output]
