"""Laws of vectors that a diffusion head defines: its chains, with guidance and temperature.

Shapes: B rows, N nodes, M = B N chains, W points of each, S steps, d size of a vector, C width of the condition; 2 M
conditions under guidance, the unconditional ones last.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from visspec.laws import Denoising, Steps
from visspec.models.nets.diffusion_head import DiffusionHead, Schedule

KEPT = 1 << 24  # largest count of modulations that are computed for all steps at once


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
        self, condition: Tensor, shape: tuple[int, int], guidance: Tensor | None = None, temperature: float = 1.0,
        calls: Counter[str] | None = None, name: str = "head",
    ) -> Denoising:  # fmt: skip
        """Laws (B, N) with conditions (M, C), or with guidance (M,), scales of the chains, (2 M, C)."""
        chains = _Chains(self, condition, shape[0] * shape[1], guidance)
        steps = self._steps(temperature, condition.device)
        return Denoising(chains, steps, shape, self.head.size, calls, name)

    def prepared(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Embedded times (S, width), and coefficients (S, 1) of a point and of the head's output in its estimate."""
        if self._prepared is None or self._prepared[0] != device:
            of_point, of_output = (part.float().to(device)[:, None] for part in self.schedule.estimate())
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
    """`laws.Predict` of M chains."""

    def __init__(self, laws: HeadLaws, condition: Tensor, count: int, guidance: Tensor | None):
        self.laws, self.count, self.guidance = laws, count, guidance
        if len(condition) != (count if guidance is None else 2 * count):
            raise ValueError(f"condition: got {len(condition)} rows, expected {count}, or twice as many with guidance")
        head = laws.head
        self.condition = head.cond_embed(condition.to(head.cond_embed.weight.dtype))
        self.table: list[tuple[Tensor, ...]] | None = None  # modulations (rows, S, width) of each part

    def __call__(self, x_MWd: Tensor, step_MW: Tensor, chains_M: Tensor | None) -> tuple[Tensor, Tensor | None]:
        head = self.laws.head
        _, of_point, of_output = self.laws.prepared(x_MWd.device)
        point, step, rows = x_MWd, step_MW, chains_M
        if self.guidance is not None:
            everyone = torch.arange(self.count, device=x_MWd.device) if chains_M is None else chains_M
            point, step = torch.cat([x_MWd, x_MWd]), torch.cat([step_MW, step_MW])
            rows = torch.cat([everyone, everyone + self.count])
        said = head.modulated(point.to(head.input_proj.weight.dtype), self._modulations(step, rows)).float()
        if self.guidance is not None:
            said, without = said.chunk(2)
            scale = (self.guidance if chains_M is None else self.guidance[chains_M])[:, None, None]
            mixed = without[..., : head.size] + scale * (said - without)[..., : head.size]
        else:
            mixed = said[..., : head.size]
        value = of_point[step_MW] * x_MWd + of_output[step_MW] * mixed
        # log sigma lies between the bounds at a share of (1 + what is said) / 2, of the conditional rows under guidance
        return value, (said[..., head.size :] + 1) / 2 if head.learned else None

    def _modulations(self, step: Tensor, rows: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Of points (rows, W) at their steps. Kept for all steps while they are few: one product of matrices is faster
        than S small ones.
        """
        time_SC, head = self.laws.prepared(step.device)[0], self.laws.head
        size = len(self.condition) * len(time_SC) * time_SC.shape[1] * (3 * len(head.res_blocks) + 2)
        if size > KEPT:
            condition = self.condition if rows is None else self.condition[rows]
            return head.modulations(time_SC[step] + condition[:, None])
        if self.table is None:
            self.table = head.modulations(time_SC + self.condition[:, None])
        rows = torch.arange(len(step), device=step.device) if rows is None else rows
        return [tuple(part[rows[:, None], step] for part in parts) for parts in self.table]
