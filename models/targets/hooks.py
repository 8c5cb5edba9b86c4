"""Hooks on a shared model for the time of one pass: threads that call it meanwhile are not seen, nor disturbed."""

from __future__ import annotations

import threading

from torch.utils.hooks import RemovableHandle

# Torch numbers hooks without a lock, so that two that are put up at once can be one; and while a model is asked
# (`probe`), what other threads hang on it must neither vanish nor stay for good.
HOOKING = threading.RLock()


class Hooked:
    """A context with hooks, put up in `_put_up`. While one is removed, another thread's pass may still call it, without
    keyword arguments.
    """

    def __init__(self) -> None:
        self.caller = threading.get_ident()

    def __enter__(self):
        with HOOKING:
            self.hooks = self._put_up()
        return self

    def __exit__(self, *error) -> None:
        with HOOKING:
            for hook in self.hooks:
                hook.remove()

    @property
    def calling(self) -> bool:
        """Whether the present call is of the thread that opened the context."""
        return threading.get_ident() == self.caller

    def _put_up(self) -> list[RemovableHandle]:
        raise NotImplementedError
