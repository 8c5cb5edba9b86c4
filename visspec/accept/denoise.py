"""Chains of Gaussian steps, several steps at a time, coupled to drafted chains: exact draws from a `Denoising` law.

Every pass of the head takes W points of each chain. The first is known; the others are proposals, drawn from a cheaper
law of the next point whose Gaussian is known too: while the chain runs along a drafted one, from the drafter's (its
points are the proposals), elsewhere from a Gaussian around the mean that follows from an extrapolated estimate of the
value. Each proposal is then coupled with the target's own law of that point (`couplings`): up to the first that is not
the same, all are kept, and that one is replaced. (De Bortoli et al., arXiv 2501.05370, freeze the drift; the coupling
of whole chains, with coalescing again after a difference, is ours.) W = 1 is a plain chain. The less noise is left, the
sooner a proposal fails: a chain takes 1 / AHEAD of its remaining steps at most.

Shapes: M chains, S steps, W points of a pass, d size.
"""

from __future__ import annotations

from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visspec.accept.couplings import bounded, reflected
from visspec.cache import to_device
from visspec.laws import Denoising, Steps, Trajectory
from visspec.sampling import Numbers
from visspec.types import Draft

AHEAD = 5  # measured: windows of 16 keep 13 points with half of the steps left, 5 with a quarter, 2 with a tenth
MOST = 32  # points of a chain in a pass

_forecasts: WeakKeyDictionary[Steps, Forecast] = WeakKeyDictionary()


class Forecast(NamedTuple):
    """Coefficients of the points after each step i when the estimate of the value is o + k o' at the k-th of them:
    x_(i+k+1) = point x_i + value o + slope o' + sum_j noise_j sigma_(i+j) z_(i+j).
    """

    point: Tensor  # (S, W)
    value: Tensor  # (S, W)
    slope: Tensor  # (S, W)
    noise: Tensor  # (S, W, W)


def forecast(steps: Steps) -> Forecast:
    """The coefficients for windows of `MOST` steps, kept for a schedule. Steps beyond the last change nothing."""
    if steps not in _forecasts:
        with torch.inference_mode(False):
            _forecasts[steps] = _forecast(steps, MOST)
    return _forecasts[steps]


def _forecast(steps: Steps, window: int) -> Forecast:
    size = len(steps)
    keep = torch.cat([steps.keep, steps.keep.new_ones(window)])
    move = torch.cat([steps.move, steps.move.new_zeros(window)])
    point, value, slope = keep.new_ones(size), keep.new_zeros(size), keep.new_zeros(size)
    noise = keep.new_zeros(size, window)
    columns: list[list[Tensor]] = [[], [], [], []]
    for k in range(window):
        a, b = keep[k : k + size], move[k : k + size]
        point, value, slope, noise = a * point, a * value + b, a * slope + b * k, a[:, None] * noise
        noise[:, k] = 1.0
        for column, now in zip(columns, (point, value, slope, noise)):
            column.append(now)
    return Forecast(*(torch.stack(column, dim=1) for column in columns))


class Drafted(NamedTuple):
    """Trajectories of M chains: points (M, S + 1, d), mean (M, S, d), log_sigma (M, S, 1 or d)."""

    points: Tensor
    mean: Tensor
    log_sigma: Tensor
    there: Tensor  # (M,) bool


def below(draft: Draft) -> Drafted | None:
    """The trajectory drafted below each node of a chain, for M = B N chains; its last node has none."""
    if draft.q is None:
        return None
    q = cast(Trajectory, draft.q)
    there = torch.ones_like(draft.value[..., 0], dtype=torch.bool) if draft.real is None else draft.real
    there = torch.cat([there[:, 1:], torch.zeros_like(there[:, :1])], dim=1)
    points, mean, log_sigma = (part.roll(-1, dims=1).flatten(0, 1) for part in (q.points, q.mean, q.log_sigma))
    return Drafted(points, mean, log_sigma, there.flatten())


class Proposals(NamedTuple):
    """The W next points of each chain as proposed, and the Gaussians that they were drawn from."""

    points: Tensor  # (M, W, d)
    normal: Tensor  # (M, W, d) standardised
    mean: Tensor  # (M, W, d)
    log_sigma: Tensor  # (M, W, 1 or d)
    along: Tensor  # (M, W) bool: it is the drafted point


class Chains(NamedTuple):
    """Where the M chains are that are not finished."""

    step: Tensor  # (M,) steps done
    x: Tensor  # (M, d)
    along: Tensor  # (M,) bool: x is the drafted point of this step
    value: Tensor  # (M, d) latest estimate of the value
    slope: Tensor  # (M, d) its latest change

    def select(self, keep: Tensor) -> Chains:
        return Chains(*(part[keep] for part in self))


def run(
    law: Denoising, numbers: Numbers, drafted: Drafted | None, nodes: int, window: int, merge: int
) -> tuple[Tensor, Tensor]:
    """One value of each of M = B nodes laws, and which equal the drafted one: (M, d), (M,) bool.

    Once a chain of a row ends elsewhere than its draft, the later ones of the row are dropped; their values are 0.
    merge: number of last steps in which a chain that has left the drafted one may meet it again. Each pass of the head
    synchronises once, to know which chains are done.
    """
    count, steps, device = len(numbers.start), len(law.steps), numbers.start.device
    ends, equal = torch.zeros_like(numbers.start), torch.zeros(count, dtype=torch.bool, device=device)
    zero = torch.zeros(count, dtype=torch.long, device=device)
    start, along = numbers.start, equal.clone()
    if drafted is not None:
        start, along = torch.where(drafted.there[:, None], drafted.points[:, 0], start), drafted.there
    chains = Chains(zero, start, along, torch.zeros_like(start), torch.zeros_like(start))
    widths = [reach(steps - step, window) for step in range(steps)]
    reach_S = to_device(widths, device)
    alive, width = list(range(count)), widths[0]
    chosen: Tensor | None = None  # indices of living chains; None: all
    own, path = numbers, drafted
    following, close = drafted is not None, False
    while alive:
        guide = path if following or close else None
        chains = advance(law, chains, own, guide, chosen, reach_S[:, None][chains.step], width, merge if close else 0)
        there = zero[: len(alive)] if path is None else path.there.long()
        done, met, drafts = torch.stack([chains.step, chains.along.long(), there]).tolist()
        following = any(met)
        close = any(t and not m and n + window > steps - merge for n, m, t in zip(done, met, drafts))
        over = [c for c, n in enumerate(done) if n == steps]
        width = max((widths[n] for n in done if n < steps), default=1)
        if not over:
            continue
        at = to_device(over, device)
        places = to_device([alive[c] for c in over], device)
        ends[places], equal[places] = chains.x[at], chains.along[at]
        last: dict[int, int] = {}  # of each row: the first node that ended elsewhere
        for c in over:
            if not met[c]:
                row, node = divmod(alive[c], nodes)
                last[row] = min(node, last.get(row, nodes))
        gone = set(over)
        keep = [
            c for c, place in enumerate(alive)
            if c not in gone and place % nodes <= last.get(place // nodes, nodes)
        ]  # fmt: skip
        alive, kept = [alive[c] for c in keep], to_device(keep, device)
        if alive:
            chosen = to_device(alive, device)
            chains = chains.select(kept)
            own = Numbers(*(part[chosen] for part in numbers))
            path = None if drafted is None else Drafted(*(part[chosen] for part in drafted))
    return ends, equal


def reach(left: int, window: int) -> int:
    """Points of a chain in a pass, with so many steps left."""
    return min(left, max(2, left // AHEAD), window)


def advance(
    law: Denoising, chains: Chains, numbers: Numbers, drafted: Drafted | None, chosen: Tensor | None, reach_M1: Tensor,
    width: int, merge: int,
) -> Chains:  # fmt: skip
    """One pass of the head over W = `width` points of each chain, of which `reach` count; every chain moves by one step
    at least.
    """
    steps = law.steps
    place = torch.arange(width, device=chains.step.device)
    index = (chains.step[:, None] + place).clamp(max=len(steps) - 1)
    own = proposals(steps, chains, index, numbers, drafted, place == reach_M1 - 1, merge)
    before = torch.cat([chains.x[:, None], own.points[:, :-1]], dim=1)
    mean, log_sigma, value = law.kernel(before, index, chosen)
    coin = at_steps(numbers.coins[..., 0], index)
    if steps.fixed:
        drawn, same = reflected(own.normal, own.mean, mean, log_sigma, coin)
        if drafted is not None:  # of other deviations: an exact draw that never is the same point
            same = same & (own.log_sigma == log_sigma).all(dim=-1)
    else:
        drawn, same = bounded(
            own.points, own.mean, own.log_sigma, mean, log_sigma, coin, at_steps(numbers.candidates, index),
            at_steps(numbers.chances, index),
        )  # fmt: skip
    kept_M1 = same.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    moved_M1 = torch.minimum(kept_M1 + 1, reach_M1)
    stays_M1, last = same.gather(1, moved_M1 - 1), (moved_M1 - 1)[..., None].expand(-1, 1, mean.shape[-1])
    x = torch.where(stays_M1, own.points.gather(1, last)[:, 0], drawn.gather(1, last)[:, 0])
    along = (stays_M1 & own.along.gather(1, moved_M1 - 1))[:, 0]
    now = value.gather(1, last)[:, 0]
    former = torch.cat([chains.value[:, None], value], dim=1).gather(1, last)[:, 0]
    slope = (now - former) * (chains.step[:, None] + moved_M1 > 1)
    return Chains(chains.step + moved_M1[:, 0], x, along, now, slope)


def proposals(
    steps: Steps, chains: Chains, index: Tensor, numbers: Numbers, drafted: Drafted | None, final: Tensor, merge: int
) -> Proposals:
    """The next W points: along the drafted chain where a chain is on it, else around the extrapolated estimate.

    final (M, W) bool: each chain's last point that counts.
    """
    log_sigma = steps.low[index][..., None]
    if not steps.fixed:  # between the bounds; an estimate of deviations would say more
        log_sigma = (log_sigma + steps.high[index][..., None]) / 2
    normal = at_steps(numbers.steps, index)
    ahead, width = forecast(steps), index.shape[1]
    step = index[:, 0]
    of_x, of_value, of_slope = (part[step, :width, None] for part in ahead[:3])
    points = of_x * chains.x[:, None] + of_value * chains.value[:, None] + of_slope * chains.slope[:, None]
    points = torch.baddbmm(points, ahead.noise[step, :width, :width], log_sigma.exp() * normal)
    mean = points - log_sigma.exp() * normal
    away = Proposals(points, normal, mean, log_sigma, torch.zeros_like(index, dtype=torch.bool))
    if drafted is None:
        return away
    mean, log_sigma = at_steps(drafted.mean, index), at_steps(drafted.log_sigma, index)
    points = at_steps(drafted.points, index + 1)
    normal = (points - mean) * (-log_sigma).exp()
    on = Proposals(points, normal, mean, log_sigma, torch.ones_like(away.along))
    if merge:
        near = (index >= len(steps) - merge) & drafted.there[:, None]
        away = merging(steps, chains, index, numbers, on, near, final, away)
    return Proposals(*(torch.where(chains.along.view(-1, *[1] * (b.dim() - 1)), a, b) for a, b in zip(on, away)))


def merging(
    steps: Steps, chains: Chains, index: Tensor, numbers: Numbers, on: Proposals, near: Tensor, final: Tensor,
    away: Proposals,
) -> Proposals:  # fmt: skip
    """Proposals of chains away from the drafted one, one after another, coupled with its points where `near` (M, W).

    The final one is the drafted point itself: no pass goes on from it, so the target's own draw is coupled with it.
    """
    coin = at_steps(numbers.coins[..., 1], index)
    log_sigmas = torch.where(near[..., None], on.log_sigma, away.log_sigma)
    x, met = chains.x, torch.zeros_like(chains.along)
    made = []
    for k in range(index.shape[1]):
        keep, move = steps.keep[index[:, k]][:, None], steps.move[index[:, k]][:, None]
        mean = keep * x + move * (chains.value + k * chains.slope)
        log_sigma, close = log_sigmas[:, k], near[:, k]
        drawn, same = reflected(on.normal[:, k], on.mean[:, k], mean, log_sigma, coin[:, k])
        ends = final[:, k]
        same = (same | ends) & close
        drawn = torch.where(close[:, None], drawn, torch.addcmul(mean, log_sigma.exp(), away.normal[:, k]))
        own = met | (same & ends)
        mean = torch.where(own[:, None], on.mean[:, k], mean)
        met = met | same
        x = torch.where(met[:, None], on.points[:, k], drawn)
        made.append((x, (x - mean) * (-log_sigma).exp(), mean, log_sigma, met))
    return Proposals(*(torch.stack(column, dim=1) for column in zip(*made)))


def at_steps(values: Tensor, index: Tensor) -> Tensor:
    """(M, S, ...) at the steps (M, W) of each chain: (M, W, ...)."""
    return values[torch.arange(len(index), device=index.device)[:, None], index]
