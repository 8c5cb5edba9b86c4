"""Distributions of vectors defined by a diffusion head: its denoising chains, with guidance and temperature.

Shapes: B rows, N nodes, M = B N chains, W points of each, S steps, d size of a vector, C width of the condition. Under
guidance there are 2 M conditions, the unconditional ones last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visspec.distributions import Denoising, DenoisingSteps
from visspec.models.vectors.diffusion_head import DiffusionHead, Schedule

MOST_ROWS = 1 << 14  # maximum chains times steps whose modulations are precomputed together, which is faster


class HeadDistributions:
    """Distributions of a head's chains on a schedule. `steps` are those at temperature 1.

    Everything independent of a chain is computed once per device: times, coefficients, steps by temperature.
    """

    def __init__(self, head: DiffusionHead, schedule: Schedule):
        if head.learned != (not schedule.steps.fixed):
            what = "learned" if head.learned else "fixed"
            raise ValueError(f"schedule: its deviations are not the head's, expected {what} ones.")
        self.head, self.schedule, self.steps = head, schedule, schedule.steps
        self._prepared: tuple[torch.device, Tensor, Tensor, Tensor] | None = None
        self._warm: dict[tuple[float, torch.device], DenoisingSteps] = {}
        parts = schedule.steps.keep, schedule.steps.move, *schedule.estimate()
        keep_S, move_S, point_S, output_S = (part.double().cpu() for part in parts)
        # coefficients of a point and of the head's output in the mean of the next point
        self.moves = list(zip((keep_S + move_S * point_S).tolist(), (move_S * output_S).tolist()))

    def __call__(
        self,
        condition: Tensor,
        shape: tuple[int, int],
        guidance: Tensor | float | None = None,
        temperature: float = 1.0,
        calls: Counter[str] | None = None,
        name: str = "head",
    ) -> Denoising:
        """Return distributions (B, N) for conditions (M, C), or (2 M, C) with guidance (one scale, or (M,))."""
        return HeadChains(self, condition, shape, guidance, self._steps(temperature, condition.device), calls, name)

    def schedule_tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedded times (S, width), and coefficients (S, 1) of a point and the output in its estimate."""
        if self._prepared is None or self._prepared[0] != device:
            of_point, of_output = (part.float().to(device)[:, None] for part in self.schedule.estimate())
            with torch.inference_mode(False), torch.no_grad():
                time_SC = self.head.time_embed(self.schedule.times.to(device))
            self._prepared = device, time_SC, of_point, of_output
        return self._prepared[1:]

    def _steps(self, temperature: float, device: torch.device) -> DenoisingSteps:
        key = temperature, device
        if key not in self._warm:
            with torch.inference_mode(False):
                self._warm[key] = self.steps.warmer(temperature).to(device)
        return self._warm[key]


class HeadChains(Denoising):
    """The M chains of a head. G = 1, or 2 with guidance, the unconditional ones last; U = M W points; V number of
    modulations.
    """

    def __init__(
        self,
        distributions: HeadDistributions,
        condition: Tensor,
        shape: tuple[int, int],
        guidance: Tensor | float | None,
        steps: DenoisingSteps,
        calls: Counter[str] | None,
        name: str,
    ):
        head = distributions.head
        super().__init__(None, steps, shape, head.size, calls, name)
        self.distributions, self.guidance = distributions, guidance
        self.halves = 1 if guidance is None else 2
        own = head.cond_embed(condition.to(head.cond_embed.weight.dtype))
        self.condition_GM1C = own.view(self.halves, shape[0] * shape[1], 1, -1)
        self.time_SC, self.of_point, self.of_output = distributions.schedule_tables(condition.device)
        self.ahead_GMSV: Tensor | None = None
        if len(condition) * len(self.time_SC) <= MOST_ROWS:
            self.ahead_GMSV = head.modulations(self.time_SC + self.condition_GM1C)

    def predict(self, x_MWd: Tensor, step: Tensor | int, chains_M: Tensor | None) -> tuple[Tensor, Tensor | None]:
        head, x_Ud = self.distributions.head, x_MWd.flatten(0, 1)  # 2-D products are the fastest
        own, *other = self._predict(x_Ud, self._modulations(step, chains_M))
        share = None
        if head.learned:  # log sigma is interpolated between its bounds at (1 + prediction) / 2
            own, output = own.split(head.size, dim=-1)
            share = ((output + 1) / 2).view_as(x_MWd)
            other = [part[..., : head.size] for part in other]
        mixed = torch.lerp(other[0], own, self._scale(chains_M, x_MWd.shape[1])) if other else own
        at = step if isinstance(step, int) else step.flatten()
        return (self.of_point[at] * x_Ud + self.of_output[at] * mixed).view_as(x_MWd), share

    def recordable(self) -> tuple[tuple, dict[str, tuple[Tensor, int]]]:
        tensors = {"condition_GM1C": (self.condition_GM1C, 1)}
        if self.ahead_GMSV is not None:
            tensors["ahead_GMSV"] = self.ahead_GMSV, 1
        scale = self.guidance
        if isinstance(scale, Tensor):
            tensors["guidance"], scale = (scale, 0), None
        weights = (weight.data_ptr() for weight in self.distributions.head.parameters())
        return (self.distributions, self.steps, scale, *weights), tensors

    def value(self, start_Md: Tensor, normal_MSd: Tensor) -> Tensor:
        """Return the values of `sample`; with fixed deviations by fewer operations, which are many and on small
        tensors.
        """
        if self.ahead_GMSV is None or not (self.steps.fixed and self.steps.noisy):
            return super().value(start_Md, normal_MSd)
        self.calls[self.name] += len(self.steps)
        x_Md, scale, modulations = start_Md, self._scale(None, 1), self.ahead_GMSV.flatten(0, 1).unbind(1)
        noise_MSd = normal_MSd * self.steps.low.exp()[:, None]
        for noise_Md, own, (of_point, of_output) in zip(noise_MSd.unbind(1), modulations, self.distributions.moves):
            output, *other = self._predict(x_Md, own)
            mixed = torch.lerp(other[0], output, scale) if other else output
            x_Md = torch.add(noise_Md, x_Md, alpha=of_point).add_(mixed, alpha=of_output)
        return x_Md

    def _predict(self, x_Ud: Tensor, modulations: Tensor) -> Sequence[Tensor]:
        """Return the head's predictions at points, and under guidance the unconditional ones: (U, d or 2 d) each."""
        inputs = x_Ud.to(modulations.dtype)
        if self.halves == 1:
            return (self.distributions.head.run_modulated(inputs, modulations).float(),)
        return self.distributions.head.run_modulated(torch.cat((inputs, inputs)), modulations).float().chunk(2)

    def _scale(self, chains_M: Tensor | None, points: int) -> Any:
        if not isinstance(self.guidance, Tensor):
            return self.guidance
        guidance_M = self.guidance if chains_M is None else self.guidance[chains_M]
        return guidance_M.repeat_interleave(points)[:, None]

    def _modulations(self, step: Tensor | int, chains_M: Tensor | None) -> Tensor:
        """Return the head's modulations (G U, ...) at U = M W points with these steps."""
        if self.ahead_GMSV is None:
            own = self.condition_GM1C if chains_M is None else self.condition_GM1C[:, chains_M]
            return self.distributions.head.modulations(self.time_SC[step] + own).flatten(0, 2)
        if isinstance(step, int):
            return self.ahead_GMSV[:, :, step].flatten(0, 1)
        rows = torch.arange(len(step), device=step.device) if chains_M is None else chains_M
        return self.ahead_GMSV[:, rows[:, None], step].flatten(0, 2)
