"""Hooks on a shared model for the duration of one pass. Calls from other threads are ignored."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils.hooks import RemovableHandle

# PyTorch numbers hooks without a lock, so two registered at once can get the same id. While a model is probed
# (`probe`), hooks that other threads register must be neither removed nor kept for good.
HOOKING = threading.RLock()


class ModuleHooks:
    """Context with hooks, registered in `_put_up`. While one is removed, another thread's pass may still call it,
    without keyword arguments.
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
        """Return whether the current call comes from the thread that opened the context."""
        return threading.get_ident() == self.caller

    def _put_up(self) -> list[RemovableHandle]:
        raise NotImplementedError


class DecoderRecorder(ModuleHooks):
    """Context that records inputs and outputs of a text decoder: merged embeddings, positions, the last hidden state
    after the final norm and, if the `last` layer is given, before it. Calls from other threads are not recorded.
    """

    def __init__(self, decoder, last=None):
        super().__init__()
        self.decoder, self.last, self.seen = decoder, last, {}

    def __enter__(self) -> dict[str, Any]:
        return super().__enter__().seen

    def _put_up(self):
        return [
            self.decoder.register_forward_pre_hook(self._entering, with_kwargs=True),
            self.decoder.register_forward_hook(self._leaving),
            *([] if self.last is None else [self.last.register_forward_hook(self._leaving_last)]),
        ]

    def _entering(self, module, args, kwargs=None) -> None:
        if self.calling:
            self.seen.update({k: kwargs.get(k) for k in ("inputs_embeds", "position_ids")})

    def _leaving(self, module, args, output) -> None:
        if self.calling:
            self.seen["last_hidden_state"] = getattr(output, "last_hidden_state", None)

    def _leaving_last(self, module, args, output) -> None:
        if self.calling:
            self.seen["before_norm"] = output[0] if isinstance(output, tuple) else output
