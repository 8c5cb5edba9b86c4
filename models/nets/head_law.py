"""Laws of vectors that a diffusion head defines: its chains, with guidance and temperature.

Shapes: B rows, N nodes, M = B N chains, W points of each, S steps, d size of a vector, C width of the condition; 2 M
conditions under guidance, the unconditional ones last.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from visspec.laws import Denoising, Steps, asked
from visspec.models.nets.diffusion_head import DiffusionHead, Schedule

MOST_ROWS = 1 << 14  # steps of chains whose modulations are computed together, which is faster than one by one


class HeadLaws:
    """Laws of a head's chains on a schedule. `steps` are those at temperature 1.

    What does not depend on a chain is computed once for a device: times, coefficients, steps by temperature.
    """

    def __init__(self, head: DiffusionHead, schedule: Schedule):
        if head.learned != (not schedule.steps.fixed):
            what = "learned" if head.learned else "fixed"
            raise ValueError(f"schedule: got other deviations than the head's, expected {what} ones")
        self.head, self.schedule, self.steps = head, schedule, schedule.steps
        self._prepared: tuple[torch.device, Tensor, Tensor, Tensor] | None = None
        self._warm: dict[tuple[float, torch.device], Steps] = {}

    def __call__(
        self, condition: Tensor, shape: tuple[int, int], guidance: Tensor | float | None = None,
        temperature: float = 1.0, calls: Counter[str] | None = None, name: str = "head", skip: float = 0.0,
    ) -> Denoising:  # fmt: skip
        """Laws (B, N) with conditions (M, C), or with guidance, a scale or those of the chains (M,), (2 M, C).

        skip: see `Denoising`; such laws can only be sampled.
        """
        chains = _Chains(self, condition, shape[0] * shape[1], guidance, skip)
        steps = self._steps(temperature, condition.device)
        return Denoising(chains, steps, shape, self.head.size, calls, name, skip)

    def prepared(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Embedded times (S, width), and coefficients (S, 1) of a point and of the head's output in its estimate."""
        if self._prepared is None or self._prepared[0] != device:
            of_point, of_output = (part.float().to(device)[:, None] for part in self.schedule.estimate())
            with torch.inference_mode(False), torch.no_grad():
                time_SC = self.head.time_embed(self.schedule.times.to(device))
            self._prepared = device, time_SC, of_point, of_output
        return self._prepared[1:]

    def _steps(self, temperature: float, device: torch.device) -> Steps:
        key = temperature, device
        if key not in self._warm:
            with torch.inference_mode(False):
                self._warm[key] = self.steps.warmer(temperature).to(device)
        return self._warm[key]


class _Chains:
    """`laws.Predict` of M chains. G = 1, or 2 with guidance, the unconditional ones last; U numbers of modulations."""

    def __init__(self, laws: HeadLaws, condition: Tensor, count: int, guidance: Tensor | float | None, skip: float):
        self.laws, self.guidance = laws, guidance
        halves = 1 if guidance is None else 2
        if len(condition) != halves * count:
            raise ValueError(f"condition: got {len(condition)} rows, expected {halves} x {count}")
        head = laws.head
        own = head.cond_embed(condition.to(head.cond_embed.weight.dtype))
        self.condition_GM1C = own.view(halves, count, 1, -1)
        self.time_SC, self.of_point, self.of_output = laws.prepared(condition.device)
        self.ahead_GMSU: Tensor | None = None
        here = asked(len(self.time_SC), skip)
        self.place = {step: place for place, step in enumerate(here)}  # of a step among those that are made ahead
        if len(condition) * len(here) <= MOST_ROWS:
            times_SC = self.time_SC if len(here) == len(self.time_SC) else self.time_SC[here]
            self.ahead_GMSU = head.modulations(times_SC + self.condition_GM1C)

    def __call__(self, x_MWd: Tensor, step: Tensor | int, chains_M: Tensor | None) -> tuple[Tensor, Tensor | None]:
        head = self.laws.head
        modulations = self._modulations(step, chains_M)
        own, *other = head.modulated(x_MWd.to(modulations.dtype), modulations).float().unbind(0)  # (M, W, d or 2 d)
        share = None
        if head.learned:  # log sigma lies between the bounds at a share of (1 + what is said) / 2
            own, said = own.split(head.size, dim=-1)
            share, other = (said + 1) / 2, [part[..., : head.size] for part in other]
        mixed = torch.lerp(other[0], own, self._scale(chains_M)) if other else own
        return self.of_point[step] * x_MWd + self.of_output[step] * mixed, share

    def _scale(self, chains_M: Tensor | None) -> Any:
        if not isinstance(self.guidance, Tensor):
            return self.guidance
        return (self.guidance if chains_M is None else self.guidance[chains_M])[:, None, None]

    def _modulations(self, step: Tensor | int, chains_M: Tensor | None) -> Tensor:
        """(G, M, W, U) of the head at these steps."""
        if self.ahead_GMSU is None:
            own = self.condition_GM1C if chains_M is None else self.condition_GM1C[:, chains_M]
            return self.laws.head.modulations(self.time_SC[step] + own)
        if isinstance(step, int):
            ahead = self.ahead_GMSU if chains_M is None else self.ahead_GMSU[:, chains_M]
            return ahead[:, :, self.place[step], None]
        rows = torch.arange(len(step), device=step.device) if chains_M is None else chains_M
        return self.ahead_GMSU[:, rows[:, None], step]
