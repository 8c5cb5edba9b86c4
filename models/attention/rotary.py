"""Rotary frequencies that depend on how far a pass reaches: each node of a draft gets those of its own step.

RoPE of the kinds `dynamic` and `longrope` chooses its frequencies by the largest position of a pass, and `dynamic`
remembers the longest pass of any caller. transformers' generate, step by step, gives token t of every row the
frequencies of t steps after the longest prompt; a hook does so for each node, with copies of the module.
*Reach* is the number of positions up to the largest one of a pass. Shapes: B rows, N nodes, E rotated size.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn

from visspec.models.attention.pass_inputs import ModuleHooks


def modules(model: nn.Module) -> list[nn.Module]:
    """Return the rotary modules of a model whose frequencies depend on the sequence length."""

    def depends(kind: object) -> bool:
        kinds = kind.values() if isinstance(kind, dict) else [kind]  # some models have one kind per layer type
        return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)

    return [module for module in model.modules() if depends(getattr(module, "rope_type", None))]


class SteppedRope(ModuleHooks):
    """Context in which the modules give this thread's calls the frequencies of the given reaches.

    Args:
        reach_BN: Reach of each node; None in a prefill, which has the reach of its longest row. `moves` then tells
            whether the frequencies change within up to `new` more tokens.
    """

    def __init__(self, modules: list[nn.Module], reach_BN: Tensor | None = None, new: int = 0):
        super().__init__()
        self.modules, self.reach_BN, self.new, self.moves = modules, reach_BN, new, False
        self.reaches = [] if reach_BN is None else reach_BN.unique().tolist()

    def _put_up(self):
        return [module.register_forward_hook(self._after_call, with_kwargs=True) for module in self.modules]

    def _after_call(self, module, args, kwargs, output=None):
        if not self.is_caller:
            return None
        arguments = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        if arguments.get("position_ids") is None:
            return None
        if self.reach_BN is None:
            parts = self._prefill(arguments)
        else:
            parts = _parts(output)
            for reach in self.reaches:
                at_reach = (self.reach_BN == reach)[..., None]
                parts = [torch.where(at_reach, new, old) for new, old in zip(_rotations(arguments, reach), parts)]
        return tuple(parts) if isinstance(output, tuple) else parts[0]

    def _prefill(self, arguments: dict) -> list[Tensor]:
        positions = arguments["position_ids"]
        ends = positions[..., -1].flatten().tolist()
        one = arguments | {"position_ids": positions.new_ones(1, 1).expand(*positions.shape[:-2], 1, 1)}
        first, last = (_rotations(one, reach) for reach in (max(min(ends) + 1, 2), max(ends) + self.new + 2))
        self.moves |= not all(torch.equal(a, b) for a, b in zip(first, last))
        return _rotations(arguments, int(positions.max()) + 1)


def _rotations(arguments: dict, reach: int) -> list[Tensor]:
    """Return what a freshly loaded module gives at the positions of a call, (..., N, E) each, for this reach."""
    module, positions = arguments["self"], arguments["position_ids"]
    fresh = copy.copy(module)
    buffers = module._buffers.items()  # optional buffers may be None
    fresh._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers}
    last = torch.full_like(positions[..., :1], reach - 1)
    for places in (0 * last, torch.cat([positions.clamp(max=reach - 1), last], dim=-1)):  # the short call resets it
        output = type(module).forward(**arguments | {"self": fresh, "position_ids": places})
    return [part[..., :-1, :] for part in _parts(output)]


def _parts(output: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """Return cosines and sines (..., N, E), or one complex tensor of both, as a list."""
    return list(output) if isinstance(output, tuple) else [output]
