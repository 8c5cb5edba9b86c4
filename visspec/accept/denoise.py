"""Chains of Gaussian steps, several steps at a time, coupled to drafted chains: exact draws from a `Denoising`
distribution.

Every pass of the head takes W points of each chain. The first is known; the others are proposals, drawn from a cheaper
distribution of the next point whose Gaussian is known too: while the chain runs along a drafted one, from the drafter's
(its points are the proposals), elsewhere from a Gaussian around the mean that follows from a forecast of the estimate
of the value. Each proposal is then coupled with the target's own distribution of that point (`couplings`): up to the
first that is not the same, all are kept, and that one is replaced. (De Bortoli et al., arXiv 2501.05370, freeze the
drift; the forecast and the coupling of whole chains, with coalescing again after a difference, are ours.) W = 1 is a
plain chain.

The forecast: were the value N(m, s^2 I), x = a value + n noise, the estimate of the value would be linear in x,

    o(x) = m + share (x / a - m),    share = a^2 s^2 / (a^2 s^2 + n^2),

with m known from any point and its estimate. The s of a chain is the one of SPREADS that foretold its last estimates
best; s = 0 is the frozen drift.

Shapes: M chains, S steps, W points of a pass, d size, G = len(SPREADS).
"""

from __future__ import annotations

from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visspec.accept.couplings import candidate_coupling, reflection_coupling
from visspec.cache import to_device
from visspec.distributions import Denoising, DenoisingSteps, Trajectory
from visspec.sampling import TrajectoryNumbers
from visspec.types import Draft

MOST = 32  # points of a chain in a pass
SPREADS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.0)  # deviations of the value; the first until a chain tells another
MORE = 4  # times as many points in the next pass as this one moved
FORGOTTEN = 0.5  # share of a pass's errors of foretelling that the next pass no longer counts

_forecasts: WeakKeyDictionary[DenoisingSteps, Forecast] = WeakKeyDictionary()


class Forecast(NamedTuple):
    """Where chains go if the value has mean m and deviation SPREADS[g]. At step i the estimate of the value is
    of_x x + of_mean m, the next point near(i) = keep x + move m, and the k-th after step i

        x_(i+k+1) = point x_i + mean m + sum_j noise_j sigma_(i+j) z_(i+j).
    """

    of_x: Tensor  # (G, S)
    of_mean: Tensor  # (G, S)
    keep: Tensor  # (G, S)
    move: Tensor  # (G, S)
    point: Tensor  # (G, S, W)
    mean: Tensor  # (G, S, W)
    noise: Tensor  # (G, S, W, W)
    weight: Tensor  # (S,) of an error of the estimate, squared: in deviations of the next point


def forecast(steps: DenoisingSteps) -> Forecast:
    """The coefficients for windows of `MOST` steps, kept for a schedule. Steps beyond the last change nothing."""
    if steps not in _forecasts:
        with torch.inference_mode(False):
            _forecasts[steps] = Forecast(*(part.to(steps.keep) for part in _forecast(steps, MOST)))
    return _forecasts[steps]


def _forecast(steps: DenoisingSteps, window: int) -> Forecast:
    keep_S, move_S, low_S, high_S = (part.double() for part in (steps.keep, steps.move, steps.low, steps.high))
    variance_S = (low_S + high_S).exp()
    signals, noises = [keep_S.new_zeros(())], [keep_S.new_ones(())]  # of x = a value + n noise, n squared
    for keep, move, variance in zip(keep_S[:-1], move_S[:-1], variance_S):
        signals.append(keep * signals[-1] + move)
        noises.append(keep**2 * noises[-1] + variance)
    a_S, square_S = torch.stack(signals), torch.stack(noises)
    spread_G1 = keep_S.new_tensor(SPREADS)[:, None].square()
    whole_GS = a_S**2 * spread_G1 + square_S
    of_x, of_mean = a_S * spread_G1 / whole_GS, square_S / whole_GS
    keep_GS, move_GS = keep_S + move_S * of_x, move_S * of_mean
    count, size = keep_GS.shape
    keep = torch.cat([keep_GS, keep_GS.new_ones(count, window)], dim=1)
    move = torch.cat([move_GS, move_GS.new_zeros(count, window)], dim=1)
    point, mean = torch.ones_like(keep_GS), torch.zeros_like(keep_GS)
    noise = keep_GS.new_zeros(count, size, window)
    columns: list[list[Tensor]] = [[], [], []]
    for k in range(window):
        own, add = keep[:, k : k + size], move[:, k : k + size]
        point, mean, noise = own * point, own * mean + add, own[..., None] * noise
        noise[..., k] = 1.0
        for column, now in zip(columns, (point, mean, noise)):
            column.append(now)
    ends, means, drawn = (torch.stack(column, dim=2) for column in columns)
    return Forecast(of_x, of_mean, keep_GS, move_GS, ends, means, drawn, move_S**2 / variance_S)


class DraftTrajectories(NamedTuple):
    """Trajectories of M chains: points (M, S + 1, d), mean (M, S, d), log_sigma (M, S, 1 or d)."""

    points: Tensor
    mean: Tensor
    log_sigma: Tensor
    there: Tensor  # (M,) bool


def child_trajectories(draft: Draft) -> DraftTrajectories | None:
    """The trajectory drafted below each node of a chain, for M = B N chains; its last node has none."""
    if draft.q is None:
        return None
    q = cast(Trajectory, draft.q)
    there = torch.ones_like(draft.value[..., 0], dtype=torch.bool) if draft.real is None else draft.real
    there = torch.cat([there[:, 1:], torch.zeros_like(there[:, :1])], dim=1)
    points, mean, log_sigma = (part.roll(-1, dims=1).flatten(0, 1) for part in (q.points, q.mean, q.log_sigma))
    return DraftTrajectories(points, mean, log_sigma, there.flatten())


class Proposals(NamedTuple):
    """The W next points of each chain as proposed, and the Gaussians that they were drawn from."""

    points: Tensor  # (M, W, d)
    normal: Tensor  # (M, W, d) standardised
    mean: Tensor  # (M, W, d)
    log_sigma: Tensor  # (M, W, 1 or d)
    on_draft: Tensor  # (M, W) bool: it is the drafted point


class ActiveTrajectories(NamedTuple):
    """Where the M chains are that are not finished."""

    step: Tensor  # (M,) steps done
    x: Tensor  # (M, d)
    on_draft: Tensor  # (M,) bool: x is the drafted point of this step
    mean: Tensor  # (M, d) of the value, as forecast
    spread: Tensor  # (M,) index of its deviation among SPREADS
    errors: Tensor  # (M, G) of forecasts with each of them
    reach: Tensor  # (M,) points of the next pass that count

    def select(self, keep: Tensor) -> ActiveTrajectories:
        return ActiveTrajectories(*(part[keep] for part in self))


def run(
    distribution: Denoising,
    numbers: TrajectoryNumbers,
    drafted: DraftTrajectories | None,
    nodes: int,
    window: int,
    merge: int,
) -> tuple[Tensor, Tensor]:
    """One value of each of M = B nodes distributions, and which equal the drafted one: (M, d), (M,) bool.

    Once a chain of a row ends elsewhere than its draft, the later ones of the row are dropped; their values are 0.
    merge: number of last steps in which a chain that has left the drafted one may meet it again. Each pass of the head
    synchronises once, to know which chains are done.
    """
    count, steps, device = len(numbers.start), len(distribution.steps), numbers.start.device
    ends, equal = torch.zeros_like(numbers.start), torch.zeros(count, dtype=torch.bool, device=device)
    zero = torch.zeros(count, dtype=torch.long, device=device)
    start, on_draft = numbers.start, equal.clone()
    if drafted is not None:
        start, on_draft = torch.where(drafted.there[:, None], drafted.points[:, 0], start), drafted.there
    width = min(steps, window)
    errors = start.new_zeros(count, len(SPREADS))
    chains = ActiveTrajectories(
        zero, start, on_draft, torch.zeros_like(start), zero, errors, torch.full_like(zero, width)
    )
    alive = list(range(count))
    chosen: Tensor | None = None  # indices of living chains; None: all
    own, path = numbers, drafted
    following, close = drafted is not None, False
    while alive:
        guide = path if following or close else None
        chains = advance(distribution, chains, own, guide, chosen, width, window, merge if close else 0)
        there = zero[: len(alive)] if path is None else path.there.long()
        state = torch.stack([chains.step, chains.on_draft.long(), there, chains.reach])
        done, met, drafts, reaches = state.tolist()
        following = any(met)
        close = any(t and not m and n + window > steps - merge for n, m, t in zip(done, met, drafts))
        width = max(reaches)
        over = [c for c, n in enumerate(done) if n == steps]
        if not over:
            continue
        at = to_device(over, device)
        places = to_device([alive[c] for c in over], device)
        ends[places], equal[places] = chains.x[at], chains.on_draft[at]
        last: dict[int, int] = {}  # of each row: the first node that ended elsewhere
        for c in over:
            if not met[c]:
                row, node = divmod(alive[c], nodes)
                last[row] = min(node, last.get(row, nodes))
        gone = set(over)
        keep = [
            c for c, place in enumerate(alive) if c not in gone and place % nodes <= last.get(place // nodes, nodes)
        ]
        alive, kept = [alive[c] for c in keep], to_device(keep, device)
        if alive:
            chosen = to_device(alive, device)
            chains = chains.select(kept)
            own = TrajectoryNumbers(*(part[chosen] for part in numbers))
            path = None if drafted is None else DraftTrajectories(*(part[chosen] for part in drafted))
    return ends, equal


def advance(
    distribution: Denoising,
    chains: ActiveTrajectories,
    numbers: TrajectoryNumbers,
    drafted: DraftTrajectories | None,
    chosen: Tensor | None,
    width: int,
    window: int,
    merge: int,
) -> ActiveTrajectories:
    """One pass of the head over W = `width` points of each chain, of which `reach` count; every chain moves by one step
    at least.
    """
    steps, reach_M1 = distribution.steps, chains.reach[:, None]
    place = torch.arange(width, device=chains.step.device)
    index = (chains.step[:, None] + place).clamp(max=len(steps) - 1)
    own = proposals(steps, chains, index, numbers, drafted, place == reach_M1 - 1, merge)
    before = torch.cat([chains.x[:, None], own.points[:, :-1]], dim=1)
    mean, log_sigma, value = distribution.kernel(before, index, chosen)
    uniform = at_steps(numbers.uniforms[..., 0], index)
    if steps.fixed:
        drawn, same = reflection_coupling(own.normal, own.mean, mean, log_sigma, uniform)
        if drafted is not None:  # of other deviations: an exact draw that never is the same point
            same = same & (own.log_sigma == log_sigma).all(dim=-1)
    else:
        drawn, same = candidate_coupling(
            own.points,
            own.mean,
            own.log_sigma,
            mean,
            log_sigma,
            uniform,
            at_steps(numbers.candidates, index),
            at_steps(numbers.chances, index),
        )
    kept_M1 = same.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    moved_M1 = torch.minimum(kept_M1 + 1, reach_M1)
    stays_M1, last = same.gather(1, moved_M1 - 1), (moved_M1 - 1)[..., None].expand(-1, 1, mean.shape[-1])
    x = torch.where(stays_M1, own.points.gather(1, last)[:, 0], drawn.gather(1, last)[:, 0])
    on_draft = (stays_M1 & own.on_draft.gather(1, moved_M1 - 1))[:, 0]
    step = chains.step + moved_M1[:, 0]
    reach = torch.minimum((MORE * moved_M1[:, 0]).clamp(max=window), len(steps) - step)
    return ActiveTrajectories(
        step, x, on_draft, *update_forecast(steps, chains, index, before, value, moved_M1, place), reach
    )


def update_forecast(
    steps: DenoisingSteps,
    chains: ActiveTrajectories,
    index: Tensor,
    before: Tensor,
    value: Tensor,
    moved_M1: Tensor,
    place: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, spread, errors) of the chains after a pass that found estimates `value` at points `before`.

    Only points on the way count: later ones depend on random numbers that are used again.
    """
    ahead = forecast(steps)
    of_x, of_mean = ahead.of_x[:, index, None], ahead.of_mean[:, index, None]  # (G, M, W, 1)
    means = (value - of_x * before) / of_mean
    off = torch.addcmul(of_x[:, :, 1:] * before[:, 1:] - value[:, 1:], of_mean[:, :, 1:], means[:, :, :-1])
    weight = ahead.weight[index[:, 1:]] * (place[1:] < moved_M1)
    found = (off.square().sum(dim=-1) * weight).sum(dim=-1)  # (G, M)
    errors = torch.add(found.T, chains.errors, alpha=1 - FORGOTTEN)
    spread = errors.argmin(dim=1)
    return means[spread, torch.arange(len(spread), device=spread.device), moved_M1[:, 0] - 1], spread, errors


def proposals(
    steps: DenoisingSteps,
    chains: ActiveTrajectories,
    index: Tensor,
    numbers: TrajectoryNumbers,
    drafted: DraftTrajectories | None,
    final: Tensor,
    merge: int,
) -> Proposals:
    """The next W points: along the drafted chain where a chain is on it, else around the forecast.

    final (M, W) bool: each chain's last point that counts.
    """
    log_sigma = steps.low[index][..., None]
    if not steps.fixed:  # between the bounds; an estimate of deviations would say more
        log_sigma = (log_sigma + steps.high[index][..., None]) / 2
    normal, sigma = at_steps(numbers.steps, index), log_sigma.exp()
    ahead, width = forecast(steps), index.shape[1]
    at = chains.spread, index[:, 0]
    of_x, of_mean = ahead.point[..., :width, None][at], ahead.mean[..., :width, None][at]
    points = torch.addcmul(of_x * chains.x[:, None], of_mean, chains.mean[:, None])
    points = torch.baddbmm(points, ahead.noise[..., :width, :width][at], sigma * normal)
    away = Proposals(points, normal, points - sigma * normal, log_sigma, torch.zeros_like(index, dtype=torch.bool))
    if drafted is None:
        return away
    mean, log_sigma = at_steps(drafted.mean, index), at_steps(drafted.log_sigma, index)
    points = at_steps(drafted.points, index + 1)
    normal = (points - mean) * (-log_sigma).exp()
    on = Proposals(points, normal, mean, log_sigma, torch.ones_like(away.on_draft))
    if merge:
        near = (index >= len(steps) - merge) & drafted.there[:, None]
        away = merging(steps, chains, index, numbers, on, near, final, away)
    return Proposals(*(torch.where(chains.on_draft.view(-1, *[1] * (b.dim() - 1)), a, b) for a, b in zip(on, away)))


def merging(
    steps: DenoisingSteps,
    chains: ActiveTrajectories,
    index: Tensor,
    numbers: TrajectoryNumbers,
    on: Proposals,
    near: Tensor,
    final: Tensor,
    away: Proposals,
) -> Proposals:
    """Proposals of chains away from the drafted one, one after another, coupled with its points where `near` (M, W).

    The final one is the drafted point itself: no pass goes on from it, so the target's own draw is coupled with it.
    """
    uniform = at_steps(numbers.uniforms[..., 1], index)
    log_sigmas = torch.where(near[..., None], on.log_sigma, away.log_sigma)
    x, met, ahead = chains.x, torch.zeros_like(chains.on_draft), forecast(steps)
    keeps, moves = (part[chains.spread[:, None], index] for part in (ahead.keep, ahead.move))
    made = []
    for k in range(index.shape[1]):
        mean = keeps[:, k, None] * x + moves[:, k, None] * chains.mean
        log_sigma, close = log_sigmas[:, k], near[:, k]
        drawn, same = reflection_coupling(on.normal[:, k], on.mean[:, k], mean, log_sigma, uniform[:, k])
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
