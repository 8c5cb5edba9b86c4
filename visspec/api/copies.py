"""Copying and pickling of objects around a model: constructor arguments are kept, everything else is rebuilt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, SupportsIndex

from torch import nn

from visspec.models.attention.hooks import HOOKING, ModuleHooks

INSTALLED = "_output_capturing_hooks_installed"  # transformers' mark on models that have its hooks


class Rebuildable:
    """Subclasses return their constructor arguments in `__getstate__` and rebuild themselves in `__setstate__`."""

    model: nn.Module

    def __getstate__(self) -> dict[str, Any]:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self._from(self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._from(copy.deepcopy(self.__getstate__(), memo))

    def _from(self, state: dict[str, Any]) -> Any:
        other = type(self).__new__(type(self))
        other.__setstate__(state)
        return other

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """For pickle. Raises ValueError for a model that can't be pickled because of its hooks."""
        reduced = super().__reduce_ex__(protocol)  # (function, its arguments, state, ...)
        with HOOKING:
            return *reduced[:2], _without_hooks(reduced[2], {}), *reduced[3:]


def _without_hooks(value: Any, memo: dict[int, nn.Module]) -> Any:
    """A state whose models, where they have hooks that are put up again at need, are shallow copies without them."""
    if isinstance(value, nn.Module):
        return _module(value, memo)
    if isinstance(value, dict):
        return {name: _without_hooks(each, memo) for name, each in value.items()}
    return type(value)(_without_hooks(each, memo) for each in value) if type(value) in (list, tuple) else value


def _module(module: nn.Module, memo: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in memo:
        had = dict(vars(module))
        new = {k: v for k, v in had.items() if k != INSTALLED}
        new["_modules"] = {name: child and _module(child, memo) for name, child in module._modules.items()}
        hooks = {**module._forward_pre_hooks, **module._forward_hooks}
        gone = {n for n, hook in hooks.items() if _put_up_again(hook)}
        if local := [hook.__qualname__ for n, hook in hooks.items() if n not in gone and _is_local(hook)]:
            raise ValueError(
                f"pickle: got a model with hooks that are local functions ({local[0]}), expected one without;"
                " save_pretrained keeps its weights"
            )
        for name in [name for name in had if gone and name.startswith("_forward_")]:
            new[name] = type(had[name])((n, hook) for n, hook in had[name].items() if n not in gone)
        same = not gone and INSTALLED not in had
        if same and all(child is module._modules[name] for name, child in new["_modules"].items()):
            memo[id(module)] = module
        else:
            memo[id(module)] = other = module.__new__(type(module))
            other.__dict__.update(new)
    return memo[id(module)]


def _is_local(hook: Callable) -> bool:
    return "<locals>" in getattr(hook, "__qualname__", "")


def _put_up_again(hook: Callable) -> bool:
    """Whether a hook is of a pass of ours, or one of those by which transformers collects outputs."""
    where = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"
    capturing = where.startswith("transformers.") and where.endswith("output_capturing_hook")
    return capturing or isinstance(getattr(hook, "__self__", None), ModuleHooks)
