"""Chains of Gaussian steps, several steps at a time, coupled to drafted chains. The results are exact draws from a
`Denoising` distribution.

Every pass of the head takes W points of each chain. The first is known. The others are proposals, drawn from a cheaper
Gaussian for the next point: along a drafted chain the drafter's own, whose points are the proposals; elsewhere a
Gaussian around the mean that follows from a forecast of the value. Each proposal is then coupled with the target's own
distribution of that point, so that both are equal as often as possible (`reflection_coupling`, `candidate_coupling`).
All points up to the first that differs are kept, and that one is replaced.
(De Bortoli et al., arXiv 2501.05370, freeze the drift; the forecast and the coupling of whole chains, which may meet
again after a difference, are ours.) W = 1 is a plain chain.

The forecast assumes that the value is N(m, s^2 I). With x = a value + n noise, the estimate of the value is then linear
in x,

    o(x) = m + share (x / a - m),    share = a^2 s^2 / (a^2 s^2 + n^2),

and m follows from any point and its estimate. Each chain uses the s in SPREADS that predicted its last estimates best;
s = 0 is the frozen drift.

Shapes: M chains, S steps, W points of a pass, d size, G = len(SPREADS).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from visspec.cache import to_device
from visspec.distributions import Denoising, DenoisingSteps, Trajectory
from visspec.sampling import TrajectoryNumbers
from visspec.types import Draft

if TYPE_CHECKING:
    from visspec.accept.graphed_passes import GraphedPasses

TINY = torch.finfo(torch.float32).tiny
MOST = 32  # maximum number of points of a chain in a pass
SPREADS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.0)  # possible deviations of the value; a chain starts with the first
MORE = 4  # points of the next pass, as a multiple of those that moved in this one
FORGOTTEN = 0.5  # share by which forecast errors decay per pass

_forecasts: WeakKeyDictionary[DenoisingSteps, Forecast] = WeakKeyDictionary()


class Forecast(NamedTuple):
    """Coefficients that predict a chain if the value has mean m and deviation SPREADS[g].

    At step i the estimate of the value is of_x x + of_mean m, the next point near(i) = keep x + move m, and the k-th
    point after step i

            x_(i+k+1) = point x_i + mean m + sum_j noise_j sigma_(i+j) z_(i+j).
    """

    of_x: Tensor  # (G, S)
    of_mean: Tensor  # (G, S)
    keep: Tensor  # (G, S)
    move: Tensor  # (G, S)
    point: Tensor  # (G, S, W)
    mean: Tensor  # (G, S, W)
    noise: Tensor  # (G, S, W, W)
    weight: Tensor  # (S,) weight of a squared error of the estimate, in deviations of the next point


def forecast(steps: DenoisingSteps) -> Forecast:
    """Return the coefficients for windows of `MOST` steps, cached per schedule. Steps after the last change nothing."""
    if steps not in _forecasts:
        with torch.inference_mode(False):
            _forecasts[steps] = Forecast(*(part.to(steps.keep) for part in _forecast(steps, MOST)))
    return _forecasts[steps]


def _forecast(steps: DenoisingSteps, window: int) -> Forecast:
    keep_S, move_S, low_S, high_S = (part.double() for part in (steps.keep, steps.move, steps.low, steps.high))
    variance_S = (low_S + high_S).exp()
    signals, noises = [keep_S.new_zeros(())], [keep_S.new_ones(())]  # coefficients of x = a value + n noise, n squared
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
    ends, means, normals = (torch.stack(column, dim=2) for column in columns)
    return Forecast(of_x, of_mean, keep_GS, move_GS, ends, means, normals, move_S**2 / variance_S)


class DraftTrajectories(NamedTuple):
    """Trajectories of M chains: points (M, S + 1, d), mean (M, S, d), log_sigma (M, S, 1 or d)."""

    points: Tensor
    mean: Tensor
    log_sigma: Tensor
    there: Tensor  # (M,) bool: whether the trajectory exists


def child_trajectories(draft: Draft) -> DraftTrajectories | None:
    """Return the trajectory drafted below each node of a chain, for M = B N chains. The last node has none."""
    if draft.q is None:
        return None
    q = cast(Trajectory, draft.q)
    there = torch.ones_like(draft.value[..., 0], dtype=torch.bool) if draft.real is None else draft.real
    there = torch.cat([there[:, 1:], torch.zeros_like(there[:, :1])], dim=1)
    points, mean, log_sigma = (part.roll(-1, dims=1).flatten(0, 1) for part in (q.points, q.mean, q.log_sigma))
    return DraftTrajectories(points, mean, log_sigma, there.flatten())


class Proposals(NamedTuple):
    """The W proposed next points of each chain, and the Gaussians from which they were drawn."""

    points: Tensor  # (M, W, d)
    normal: Tensor  # (M, W, d) standardised
    mean: Tensor  # (M, W, d)
    log_sigma: Tensor  # (M, W, 1 or d)
    on_draft: Tensor  # (M, W) bool: whether it is the drafted point


class ActiveTrajectories(NamedTuple):
    """State of the M chains that are not finished."""

    step: Tensor  # (M,) steps done
    x: Tensor  # (M, d)
    on_draft: Tensor  # (M,) bool: whether x is the drafted point of this step
    mean: Tensor  # (M, d) forecast mean of the value
    spread: Tensor  # (M,) index of the deviation among SPREADS
    errors: Tensor  # (M, G) forecast errors for each of SPREADS
    reach: Tensor  # (M,) number of valid points in the next pass

    def select(self, keep: Tensor) -> ActiveTrajectories:
        return ActiveTrajectories(*(part[keep] for part in self))


def run(
    distribution: Denoising,
    numbers: TrajectoryNumbers,
    drafted: DraftTrajectories | None,
    nodes: int,
    window: int,
    merge: int,
    graphs: GraphedPasses | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one value for each of M = B nodes distributions.

    If a chain of a row does not end at its draft, the later chains of the row are dropped and have no valid values.
    Each pass of the head synchronises once, to know which chains are done.

    Args:
        drafted: The drafted trajectories, if any.
        nodes: Number of nodes of each row.
        window: Maximum number of points of each chain in a pass.
        merge: Number of last steps in which a chain that has left the drafted one may meet it again.
        graphs: Runs passes as CUDA graphs where it can. Chains that are done or dropped then keep their places.

    Returns:
        The values (M, d), and whether they equal the drafted ones, (M,) bool.
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
    buffers = None if graphs is None else graphs.open(distribution, chains, numbers, drafted)
    alive = list(range(count))
    unfinished: Tensor | None = None  # indices of unfinished chains; None: all
    own, path = numbers, drafted
    following, close = drafted is not None, False
    while alive:
        near = merge if close else 0
        if graphs is None or buffers is None:
            guide = path if following or close else None
            chains = advance(distribution, chains, own, guide, unfinished, width, window, near)
            state, rows = progress(chains, path), list(range(len(alive)))
        else:
            distribution.calls[distribution.name] += 1
            state, rows = graphs.advance(buffers, width, window, near), alive
        counts, met, drafts, reaches = ([part[row] for row in rows] for part in state.tolist())
        following = any(met)
        close = any(t and not m and n + window > steps - merge for n, m, t in zip(counts, met, drafts))
        width = max(reaches)
        finished = [c for c, n in enumerate(counts) if n == steps]
        if not finished:
            continue
        if buffers is None:
            at = to_device(finished, device)
            places = to_device([alive[c] for c in finished], device)
            ends[places], equal[places] = chains.x[at], chains.on_draft[at]
        last: dict[int, int] = {}  # per row, the first node that did not end at its draft
        for c in finished:
            if not met[c]:
                row, node = divmod(alive[c], nodes)
                last[row] = min(node, last.get(row, nodes))
        gone = set(finished)
        keep = [
            c for c, place in enumerate(alive) if c not in gone and place % nodes <= last.get(place // nodes, nodes)
        ]
        alive = [alive[c] for c in keep]
        if alive and buffers is None:
            unfinished = to_device(alive, device)
            chains = chains.select(to_device(keep, device))
            own = TrajectoryNumbers(*(part[unfinished] for part in numbers))
            path = None if drafted is None else DraftTrajectories(*(part[unfinished] for part in drafted))
    return (ends, equal) if graphs is None or buffers is None else graphs.finish(buffers, count)


def progress(chains: ActiveTrajectories, drafted: DraftTrajectories | None) -> Tensor:
    """Return what the host needs after a pass, (4, M): steps done, whether on the draft, whether drafted, reach."""
    met = chains.on_draft.long()
    return torch.stack([chains.step, met, met if drafted is None else drafted.there.long(), chains.reach])


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
    """Run one pass of the head over `width` points of each chain, of which `reach` are valid. Every chain moves."""
    steps, reach_M1 = distribution.steps, chains.reach[:, None]
    place = torch.arange(width, device=chains.step.device)
    index = (chains.step[:, None] + place).clamp(max=len(steps) - 1)
    own = proposals(steps, chains, index, numbers, drafted, place == reach_M1 - 1, merge)
    points = torch.cat([chains.x[:, None], own.points[:, :-1]], dim=1)
    mean, log_sigma, value = distribution.kernel(points, index, chosen)
    uniform = at_steps(numbers.uniforms[..., 0], index)
    if steps.fixed:
        sampled, same = reflection_coupling(own.normal, own.mean, mean, log_sigma, uniform)
        if drafted is not None:  # deviations differ, so an exact draw is never the same point
            same = same & (own.log_sigma == log_sigma).all(dim=-1)
    else:
        sampled, same = candidate_coupling(
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
    x = torch.where(stays_M1, own.points.gather(1, last)[:, 0], sampled.gather(1, last)[:, 0])
    on_draft = (stays_M1 & own.on_draft.gather(1, moved_M1 - 1))[:, 0]
    step = chains.step + moved_M1[:, 0]
    reach = torch.minimum((MORE * moved_M1[:, 0]).clamp(max=window), len(steps) - step)
    return ActiveTrajectories(
        step, x, on_draft, *update_forecast(steps, chains, index, points, value, moved_M1, place), reach
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
    """Return (mean, spread, errors) of the chains after a pass with estimates `value` at points `before`. Only points
    on the chain's way count, since later ones depend on random numbers that are used again.
    """
    ahead = forecast(steps)
    of_x, of_mean = ahead.of_x[:, index, None], ahead.of_mean[:, index, None]  # (G, M, W, 1)
    means = (value - of_x * before) / of_mean
    off = torch.addcmul(of_x[:, :, 1:] * before[:, 1:] - value[:, 1:], of_mean[:, :, 1:], means[:, :, :-1])
    weight = ahead.weight[index[:, 1:]] * (place[1:] < moved_M1)
    squared = (off.square().sum(dim=-1) * weight).sum(dim=-1)  # (G, M)
    errors = torch.add(squared.T, chains.errors, alpha=1 - FORGOTTEN)
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
    """Return the next W points, along the drafted chain or around the forecast. `final` (M, W) marks the last valid
    one.
    """
    log_sigma = steps.low[index][..., None]
    if not steps.fixed:  # the middle of the bounds, since deviations are not predicted here
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
    """Return proposals of chains away from the drafted one, coupled with its points where `near` (M, W) is true. They
    are computed one after another. The final proposal is the drafted point itself: no pass continues from it, so the
    target's own draw is coupled with it.
    """
    uniform = at_steps(numbers.uniforms[..., 1], index)
    log_sigmas = torch.where(near[..., None], on.log_sigma, away.log_sigma)
    x, met, ahead = chains.x, torch.zeros_like(chains.on_draft), forecast(steps)
    keeps, moves = (part[chains.spread[:, None], index] for part in (ahead.keep, ahead.move))
    columns = []
    for k in range(index.shape[1]):
        mean = keeps[:, k, None] * x + moves[:, k, None] * chains.mean
        log_sigma, close = log_sigmas[:, k], near[:, k]
        sampled, same = reflection_coupling(on.normal[:, k], on.mean[:, k], mean, log_sigma, uniform[:, k])
        ends = final[:, k]
        same = (same | ends) & close
        sampled = torch.where(close[:, None], sampled, torch.addcmul(mean, log_sigma.exp(), away.normal[:, k]))
        own = met | (same & ends)
        mean = torch.where(own[:, None], on.mean[:, k], mean)
        met = met | same
        x = torch.where(met[:, None], on.points[:, k], sampled)
        columns.append((x, (x - mean) * (-log_sigma).exp(), mean, log_sigma, met))
    return Proposals(*(torch.stack(column, dim=1) for column in zip(*columns)))


def at_steps(values: Tensor, index: Tensor) -> Tensor:
    """Select the steps (M, W) of each chain from values (M, S, ...)."""
    return values[torch.arange(len(index), device=index.device)[:, None], index]


# Couplings of two Gaussians: given a draw from one, a draw from the other. Shapes: (..., d) points, (...) or
# (..., 1 or d) parameters; everything is in log space. Both use the point once, so the result is an exact draw from
# N(mean, sigma^2), whatever it is coupled to.


def reflection_coupling(
    normal: Tensor, other: Tensor, mean: Tensor, log_sigma: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from the maximal coupling of Gaussians of equal deviation, by reflection (Bou-Rabee, Eberle, Zimmer 2020;
    for denoising chains: De Bortoli et al., arXiv 2501.05370, algorithm 4).

    `normal` is a standardised draw from N(other, sigma^2), `uniform` (...) the log of a uniform number. Returns the
    draw from N(mean, sigma^2) (..., d), and whether it is the same point (...); if so, the caller keeps the first
    point.
    """
    sigma = log_sigma.exp()
    shift = (other - mean) / sigma
    projection = (normal * shift).sum(dim=-1)
    squared = (shift * shift).sum(dim=-1)
    same = uniform <= -(projection + squared / 2)  # log density ratio at the point
    mirror = normal - 2 * (projection / squared.clamp(min=TINY))[..., None] * shift
    return torch.addcmul(mean, sigma, mirror), same


def candidate_coupling(
    point: Tensor,
    other: Tensor,
    log_other: Tensor,
    mean: Tensor,
    log_sigma: Tensor,
    uniform: Tensor,
    candidates: Tensor,
    chances: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw from a nearly maximal coupling of Gaussians of different deviations, without a loop.

    A point of q belongs to the overlap with probability min(1, p/q), and a candidate, drawn from p, with probability
    min(1, q/p); otherwise each belongs to the residual of its distribution. A point of the overlap is kept. Otherwise
    the first candidate of the residual replaces it, or the first candidate if all belong to the overlap. That alone
    would give the overlap TV (1 - TV)^K too much of p. To compensate, the point is replaced by its last candidate in an
    equally likely event: the point belongs to the overlap, and of all candidates only the last does not. So the
    distribution is p for every K, and the point is kept with probability 1 - TV - TV (1 - TV)^K.

    Args:
        point: A draw from N(other, exp(log_other)^2).
        uniform: Log of a uniform number (...).
        candidates: Normal numbers (..., K, d).
        chances: Logs of uniform numbers (..., K).
    """
    draws = mean[..., None, :] + log_sigma.exp()[..., None, :] * candidates
    ratio, ratios = log_ratios(point, draws, other, log_other, mean, log_sigma)
    same, index = select_candidate(uniform <= ratio, chances <= ratios)
    return candidate(draws, index), same


def log_ratios(
    point: Tensor, draws: Tensor, other: Tensor, log_other: Tensor, mean: Tensor, log_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log p/q of the point (...) and log q/p of the candidates (..., K), with p = N(mean, exp(log_sigma)^2)."""
    ratio = log_density(point, mean, log_sigma) - log_density(point, other, log_other)
    ratios = log_density(draws, other[..., None, :], log_other[..., None, :])
    return ratio, ratios - log_density(draws, mean[..., None, :], log_sigma[..., None, :])


def select_candidate(overlap: Tensor, overlaps: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether the point is kept, and the index (...) of the candidate that replaces it, given whether the point
    (...) and the candidates (..., K) belong to the overlap of their two distributions.
    """
    first = overlaps.long().cumprod(dim=-1).sum(dim=-1)  # number of candidates before the first one of the residual
    count = overlaps.shape[-1]
    return overlap & (first != count - 1), torch.where(first == count, 0, first)


def candidate(draws: Tensor, index: Tensor) -> Tensor:
    """Return the candidates (..., d) at these indices (...) among draws (..., K, d)."""
    return draws.gather(-2, index[..., None, None].expand(*index.shape, 1, draws.shape[-1]))[..., 0, :]


def log_density(x: Tensor, mean: Tensor, log_sigma: Tensor) -> Tensor:
    """Return log N(x; mean, sigma^2) (...) up to a constant; deviations are (..., 1 or d)."""
    half = ((x - mean) * (-log_sigma).exp()).square().sum(dim=-1) / 2
    return -half - log_sigma.expand_as(mean).sum(dim=-1)
