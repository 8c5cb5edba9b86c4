"""Passes of `denoise.run` as CUDA graphs: one launch in place of about 180.

The chains of a round are copied to buffers once; every pass reads them there and overwrites them. Chains that are done
or dropped keep their places, and the numbers of chains and of points are rounded up, so few graphs serve all rounds.
On a CPU, for distributions that can't be recorded, and after a failed capture (with one warning), `run` needs no graph.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from visspec.accept.denoise import ActiveTrajectories, DraftTrajectories, advance, forecast, progress
from visspec.distributions import Denoising
from visspec.kernels.common import next_power_of_2
from visspec.replay import REPLAYING, Call, Recordings, capacity, fill, stream
from visspec.sampling import TrajectoryNumbers

MOST = 16  # maximum kinds of rounds with buffers; the least recently used are dropped


class GraphedPasses(Recordings):
    """Lends buffers to rounds, with the graphs that read them."""

    def __init__(self) -> None:
        super().__init__(MOST)
        self.buffers: dict[tuple, ChainBuffers] = {}

    def open(
        self,
        distribution: Denoising,
        chains: ActiveTrajectories,
        numbers: TrajectoryNumbers,
        drafted: DraftTrajectories | None,
    ) -> ChainBuffers | None:
        """Return buffers with the chains of a new round, or None if its passes run without graphs."""
        device = chains.x.device
        if not self.most or self.recorder(device) is None or torch.is_autocast_enabled(device.type):
            return None
        if (known := distribution.recordable()) is None:
            return None
        (host, tensors), rows = known, capacity(len(chains.x))
        inputs = [*((x, 0) for x in (*chains, *numbers, *(drafted or ()))), *tensors.values()]
        forms = [((*x.shape[:dim], rows, *x.shape[dim + 1 :]), x.dtype) for x, dim in inputs]
        key = (device, stream(device), drafted is None, *host, *forms)
        with REPLAYING:
            buffers = self.buffers.pop(key, None)
        if buffers is None:
            forecast(distribution.steps)  # copies to the device, which a graph can't
            made = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in forms]
            buffers = ChainBuffers(key, made, copy.copy(distribution), [*tensors], drafted is not None)
        fill(buffers.inputs, [x for x, _ in inputs])
        return buffers

    def finish(self, buffers: ChainBuffers, count: int) -> tuple[Tensor, Tensor]:
        """Return the values of the first chains, and whether they equal the drafted ones, at the end of a round."""
        values, equal = buffers.chains.x[:count].clone(), buffers.chains.on_draft[:count].clone()
        with REPLAYING:
            self.buffers[buffers.key] = buffers
            while len(self.buffers) > self.most:
                del self.buffers[next(iter(self.buffers))]
        return values, equal

    def advance(self, buffers: ChainBuffers, width: int, window: int, merge: int) -> Tensor:
        """Run a pass of a round in place, as `denoise.advance`. Returns the `progress` of all chains."""
        key = next_power_of_2(width), window, merge
        with REPLAYING, torch.cuda.device_of(buffers.state):
            if key not in buffers.graphs:
                buffers.graphs[key] = self._recorded(partial(buffers.advance, *key), buffers)
            buffers.graphs[key]()
        return buffers.state

    def _recorded(self, call: Call, buffers: ChainBuffers) -> Call:
        """Return the replay of a call on buffers. If recording fails, warn, return the call, and record no more."""
        record, before = self.recorder(buffers.state.device), [x.clone() for x in buffers.chains]
        try:
            return record(call)[1] if self.most and record is not None else call
        except RuntimeError as error:
            warnings.warn(f"acceptance: passes run without CUDA graphs: {error}", RuntimeWarning, stacklevel=4)
            self.most = 0
            return call
        finally:
            fill(buffers.chains, before)  # recording runs the call


class ChainBuffers:
    """The chains of a round and all that their passes read, at addresses that graphs hold."""

    def __init__(self, key: tuple, inputs: list[Tensor], distribution: Denoising, names: list[str], drafts: bool):
        self.key, self.inputs, self.distribution = key, inputs, distribution
        parts = iter(inputs)
        self.chains = ActiveTrajectories(*(next(parts) for _ in ActiveTrajectories._fields))
        self.numbers = TrajectoryNumbers(*(next(parts) for _ in TrajectoryNumbers._fields))
        self.drafted = DraftTrajectories(*(next(parts) for _ in DraftTrajectories._fields)) if drafts else None
        vars(distribution).update(zip(names, parts))
        distribution.calls = Counter()  # the round's own are counted by `run`
        self.state = progress(self.chains, self.drafted)
        self.graphs: dict[tuple, Call] = {}

    def advance(self, width: int, window: int, merge: int) -> None:
        """Run a pass in place. Chains that are done stay as they are."""
        chains = self.chains
        done = chains.step >= len(self.distribution.steps)
        valid = chains._replace(reach=chains.reach.clamp(1, width))  # differs for chains that are done or dropped
        moved = advance(self.distribution, valid, self.numbers, self.drafted, None, width, window, merge)
        for old, new in zip(chains, moved):
            old.copy_(torch.where(done.view(-1, *[1] * (old.dim() - 1)), old, new))
        self.state.copy_(progress(chains, self.drafted))
