"""Copying and pickling of objects around a model: constructor arguments are kept, everything else is rebuilt."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class Rebuildable:
    """Subclasses return their constructor arguments in `__getstate__` and rebuild themselves in `__setstate__`."""

    model: nn.Module

    def __setstate__(self, state: Any) -> None:
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self._from(self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._from(copy.deepcopy(self.__getstate__(), memo))

    def _from(self, state: Any) -> Any:
        other = type(self).__new__(type(self))
        other.__setstate__(state)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle. Raises ValueError for a model that can't be pickled because of its hooks."""
        for module in self.model.modules():
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                if "<locals>" in getattr(hook, "__qualname__", ""):
                    raise ValueError(
                        "pickle: got a model with hooks that are local functions (transformers puts them up when hidden"
                        " states are first collected), expected one without; save_pretrained keeps its weights"
                    )
        return super().__reduce_ex__(protocol)
