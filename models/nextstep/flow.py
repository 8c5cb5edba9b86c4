"""Schedules of flow-matching heads: x_t = t value + (1 - t) noise, from t = 0; the head predicts value - noise.

Both published samplers of NextStep-1 are chains of Gaussian steps. With the head's velocity v at t_i, the estimated
value o = x + (1 - t_i) v, and the estimated noise n = x - t_i v:

* first release: x' = x + dt ((1 + t) v - x) + sqrt(2 (1 - t) dt) z on a grid that ends at 1 - `last`, then
  x' = x + last v without noise. Rewritten with o, the steps have the form of `distributions.DenoisingSteps`.
* version 1.1: x' = (1 - t') n + t' o - s^2 dt / (2 (1 - t)) n + s sqrt(dt) z, with s = level sqrt((1 - t) / t) if
  t > 0 (at t = 0, level / sqrt(1 - t of the last step)), including the last step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visspec.distributions import DenoisingSteps
from visspec.models.vectors.diffusion_head import Schedule

QUIET = 0.00625  # deviation of the last step, where the published sampler has none: that of MAR's heads


def shift_times(times: Tensor, shift: float) -> Tensor:
    """Warp a grid of times to have more points near 0 (shift > 1) or near 1."""
    return times / (shift - (shift - 1) * times)


def flow_schedule(count: int, shift: float = 1.0, last: float = 0.04, noisy: bool = True) -> Schedule:
    """Return the first release's sampler.

    Raises ValueError if the settings give numbers that are not finite.

    Args:
        noisy: Whether the last step adds noise of deviation QUIET, a declared difference.
    """
    t = shift_times(torch.linspace(0, 1 - last, count, dtype=torch.float64), shift)
    start, dt = t[:-1], t.diff()
    keep = torch.cat([1 - 2 * dt / (1 - start), 1 - last / (1 - t[-1:])])
    move = torch.cat([(1 + start) * dt / (1 - start), last / (1 - t[-1:])])
    log_sigma = torch.cat([(2 * (1 - start) * dt).log() / 2, t.new_tensor([math.log(QUIET)])])
    return _schedule(t, keep, move, log_sigma, noisy)


def flow_schedule_v11(count: int, shift: float = 1.0, level: float = 0.8) -> Schedule:
    """Return version 1.1's sampler, which adds noise in every step. Raises ValueError like `flow_schedule`."""
    t = shift_times(torch.arange(count, dtype=torch.float64) / count, shift)
    end = torch.cat([t[1:], t.new_ones(1)])
    dt, rest = end - t, 1 - t
    deviation = level * (rest / torch.where(t == 0, 1 - t[-1], t)).sqrt()
    noise = 1 - end - deviation**2 * dt / (2 * rest)  # coefficient of the estimated noise, (x - t o) / (1 - t)
    return _schedule(t, noise / rest, end - t * noise / rest, (deviation * dt.sqrt()).log(), True)


def _schedule(t: Tensor, keep: Tensor, move: Tensor, log_sigma: Tensor, noisy: bool) -> Schedule:
    keep, move, low = (part.float() for part in (keep, move, log_sigma))
    return Schedule(DenoisingSteps(keep, move, low, low, noisy), t, t, 1 - t, "flow")
