"""Budget: mass is moved to drafted codes from their nearest neighbours, within a budget of total variation per image.

Whatever a relaxed rule does at a node, acceptance = (1 - TV(p, q)) + TV(output, p): a point of drift buys a point of
acceptance, and the rules differ in where the mass goes. This one declares a distribution p' = p + (received - given)
and keeps it exactly, by `Rejection` under p'. Mass is given by codes that are drafted too rarely and received by codes
that are drafted too often, so that all of it becomes acceptance, and only over distances of at most `reach` in the
codebook:

    drawn from q   y gives of [p - q]+, x receives of [q - p]+: the optimal partial transport in the metric of a
                   binary tree (`codebook.hierarchy`): within the smallest clusters first, the rest in larger ones
    point masses   y gives p(y) to the nearest child within reach: the optimal partial transport

The drift of a tested node is TV(p', p), in closed form, and its displacement the transport's cost, an upper bound of
the Wasserstein distance W_1(p', p). p' depends on the distributions at the node and above and on the past, never on
codes that are drafted below, so it is the distribution of the emitted code given all before; the total variation of the
distribution of whole images is at most the expected sum of drifts.

The budget: every code earns `drift`, tested nodes spend. A node whose parents have spent all that the codes up to it
have earned moves only a share of the mass, so at any moment drift per code <= `drift`, in every image, by construction.
The price of a move is its distance: mass moves within a reach that is proportional to what is left
(`BudgetedNoise.reserve`), at most the `reach` that is given, so that spending balances earning without being tuned and
mass is moved where it is cheap; and smaller below, where an accepted code is followed by fewer. At temperature 0 the
rule is greedy and exact.

B rows, N nodes, V vocabulary, K codes, P codes padded to a power of two, C clusters, S codes of a cluster, E features.
Laws keep their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visspec.accept import codebook
from visspec.accept.rejection import Rejection
from visspec.distributions import categorical
from visspec.sampling import AcceptanceNoise, BufferedNoise
from visspec.types import Capabilities, Draft, RuleTraits, Scores, Verdict

HORIZON = 4.0  # codes' earnings; with so much in reserve the reach is one unit
FOLLOWS = 0.8  # assumed chance that a drafted code is accepted, in what an acceptance is worth
DIRECT = "donot_use_mm_for_euclid_dist"  # a product's rounding would depend on the batch
TINY = 1e-30


class BudgetedNoise(AcceptanceNoise):
    """Coins, and what each row may still spend: the drift that its codes have earned less what was spent."""

    def __init__(self, generators: Sequence[torch.Generator], earned: float):
        super().__init__(generators)
        self.earned = earned
        device = self.ahead[0].device
        self.reserve = torch.zeros(len(self.generators), dtype=torch.float64, device=device)  # (B,)

    def spend(self, spent_B: Tensor, codes_B: Tensor) -> None:
        """After a round that emitted so many codes."""
        self.reserve = (self.reserve + self.earned * codes_B - spent_B).clamp(min=0.0)

    def select(self, keep: Sequence[int]) -> None:
        super().select(keep)
        self.reserve = self.reserve[list(keep)]

    def join(self, other: BufferedNoise, take: Sequence[int]) -> None:
        super().join(other, take)
        assert isinstance(other, BudgetedNoise)
        self.reserve = torch.cat([self.reserve, other.reserve[list(take)]])


class Clusters(NamedTuple):
    """A binary tree of the codes, as clusters of 2, 4, 8 ... of them in the tree's order."""

    order: Tensor  # (P,) codes in the tree's order; ids from K on are padding
    place: Tensor  # (K,) of each code in it
    levels: list[tuple[Tensor, Tensor, Tensor]]  # codes (C, S, E), squared norms (C, S), radii (C,)
    unit: float  # mean radius of clusters of four

    @classmethod
    def of(cls, codes_KE: Tensor) -> Clusters:
        order_P = codebook.hierarchy(codes_KE)
        centre_E = codes_KE.mean(0)
        padding = centre_E.expand(len(order_P) - len(codes_KE), -1)
        codes_PE = torch.cat([codes_KE, padding])[order_P] - centre_E
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        while not levels or len(levels[-1][0]) > 1:
            codes_CSE = codes_PE.unflatten(0, (-1, 2 << len(levels)))
            apart_C = (codes_CSE - codes_CSE.mean(1, keepdim=True)).square().sum(-1).mean(1)
            radius_C = (2 * apart_C).sqrt()  # root of the mean squared distance of two codes drawn from it
            if levels:
                radius_C = torch.maximum(radius_C, levels[-1][2].unflatten(0, (-1, 2)).amax(1))
            levels.append((codes_CSE, codes_CSE.square().sum(-1), radius_C))
        unit = float(levels[min(1, len(levels) - 1)][2].mean()) or 1.0
        return cls(order_P, order_P.argsort()[: len(codes_KE)], levels, unit)


class DeclaredTarget(NamedTuple):
    """What the rule declares for a draft."""

    p: Tensor  # (B, N, V) the distribution that each node's children are tested under and the next code is drawn from
    drift: Tensor  # (B, N) total variation of each node's distribution
    displacement: Tensor  # (B, N) its transport's cost


class MassMoves(NamedTuple):
    """Mass that nodes could move: received less given (B, N, K), its total variation and its cost (B, N)."""

    mass: Tensor
    drift: Tensor
    cost: Tensor


class Budget(Rejection):
    """drift: maximum total variation per code, 0: exact; reach: maximum distance of a move, in mean radii of clusters
    of four codes.
    """

    traits = RuleTraits(judges_draws=True, remembers=True)

    def __init__(self, drift: float = 0.05, reach: float = 2.0):
        if not 0 <= drift <= 1:
            raise ValueError(f"drift: got {drift}, expected a total variation per code in [0, 1]")
        if not reach >= 0:
            raise ValueError(f"reach: got {reach}, expected a distance of at least 0")
        self.drift, self.reach = float(drift), float(reach)
        self.clusters: Clusters | None = None

    def bind(self, capabilities: Capabilities) -> None:
        self.codes = codebook.require_codebook(capabilities, "Budget").float()
        self.count = len(self.codes)
        self.clusters = Clusters.of(self.codes)

    def make_noise(self, generators: Sequence[torch.Generator], width: int) -> BudgetedNoise:
        return BudgetedNoise(generators, self.drift)

    def __call__(self, draft: Draft, scores: Scores, noise: AcceptanceNoise | None) -> Verdict:
        if noise is None:
            return self.greedy(draft, scores)
        assert isinstance(noise, BudgetedNoise)
        declared = self.declare(draft, categorical(scores.distribution).p, noise.reserve)
        verdict = self.within_budget(draft, declared, *noise.accept_uniforms(draft.tree))
        assert verdict.drift is not None
        noise.spend(verdict.drift, verdict.length)
        return verdict

    def within_budget(self, draft: Draft, declared: DeclaredTarget, coins_BN: Tensor, draw_B: Tensor) -> Verdict:
        """The verdict under the declared distributions, with the drift and displacement of the nodes on the path."""
        verdict = self.judge(draft, declared.p, coins_BN, draw_B)
        path_BD, on_BD = verdict.path.clamp(min=0), verdict.path >= 0
        drift_B, far_B = ((part.gather(1, path_BD) * on_BD).sum(1) for part in declared[1:])
        return Verdict(verdict.path, verdict.length, verdict.next, drift_B, far_B)

    def declare(self, draft: Draft, p_BNV: Tensor, reserve_B: Tensor) -> DeclaredTarget:
        """The distributions that the output of a draft has, within what each row has left."""
        if self.clusters is None:
            raise ValueError("acceptance: Budget has no codebook, expected bind(capabilities) first")
        nothing_BN = p_BNV.new_zeros(p_BNV.shape[:2])
        if draft.tree.size == 1 or self.drift == 0:
            return DeclaredTarget(p_BNV, nothing_BN, nothing_BN)
        depth_BN, left_B1 = draft.tree.depth.to(p_BNV.dtype), reserve_B.to(p_BNV.dtype)[:, None]
        worth_BN = (1.0 - FOLLOWS ** (draft.levels - depth_BN)) / (1.0 - FOLLOWS**draft.levels)
        reach_BN = (
            ((left_B1 + self.drift) / (self.drift * HORIZON)).clamp(max=self.reach) * self.clusters.unit * worth_BN
        )
        moves = (
            self.move_to_nearest(draft, p_BNV, reach_BN)
            if draft.q is None
            else self.transport_to_sample(draft, p_BNV, reach_BN)
        )
        allowed_BN = left_B1 + self.drift * (depth_BN + 1)
        spent_BN = within(moves.drift, allowed_BN, draft.tree.ancestor, draft.tree.parent)
        share_BN = spent_BN / moves.drift.clamp(min=TINY)
        law_BNV = p_BNV.clone()
        law_BNV[..., : self.count] = (p_BNV[..., : self.count] + share_BN[..., None] * moves.mass).clamp(min=0.0)
        return DeclaredTarget(law_BNV, spent_BN, share_BN * moves.cost)

    def transport_to_sample(self, draft: Draft, p_BNV: Tensor, reach_BN: Tensor) -> MassMoves:
        """Sampled drafts: mass moves towards the distribution that each node's first child was drawn from."""
        assert draft.q is not None and self.clusters is not None
        rows, nodes, _ = p_BNV.shape
        index_N = torch.arange(nodes, device=p_BNV.device)
        child_BN, above_BN = torch.where(self.children(draft), index_N, nodes), draft.tree.parent.clamp(min=0)
        none_BN = torch.full_like(child_BN, nodes)
        first_BN = none_BN.scatter_reduce(1, above_BN.expand_as(child_BN), child_BN, "amin")
        q_BNV = categorical(draft.q).p.to(p_BNV.dtype)
        gap_BNK = q_BNV[torch.arange(rows, device=p_BNV.device)[:, None], first_BN.clamp(max=nodes - 1)] - p_BNV
        gap_BNK = gap_BNK[..., : self.count] * (first_BN < nodes)[..., None]
        return transport(gap_BNK, self.clusters, reach_BN)

    def move_to_nearest(self, draft: Draft, p_BNV: Tensor, reach_BN: Tensor) -> MassMoves:
        """Point masses: each code within reach gives all that it has to the nearest child."""
        assert self.codes is not None
        rows, nodes, _ = p_BNV.shape
        real_BN, x_BN = self.children(draft), draft.value.clamp(max=self.count - 1)
        above_BN = draft.tree.parent.clamp(min=0).expand_as(x_BN)
        wide_BNK = above_BN[..., None].expand(-1, -1, self.count)
        far_BNK = torch.cdist(self.codes[x_BN], self.codes, compute_mode=DIRECT).to(p_BNV.dtype)
        far_BNK = far_BNK.masked_fill(~real_BN[..., None], torch.inf)
        nearest_BNK = torch.full_like(far_BNK, torch.inf).scatter_reduce(1, wide_BNK, far_BNK, "amin")
        index_BN1 = torch.arange(nodes, device=p_BNV.device)[None, :, None]
        winner_BNK = torch.where(far_BNK == nearest_BNK.gather(1, wide_BNK), index_BN1, nodes)
        winner_BNK = torch.full_like(winner_BNK, nodes).scatter_reduce(1, wide_BNK, winner_BNK, "amin")  # of equals
        place_BN = above_BN * self.count + x_BN
        drafted_BM = torch.zeros(rows, nodes * self.count, dtype=torch.long, device=p_BNV.device)
        drafted_BM = drafted_BM.scatter_reduce(1, place_BN, real_BN.long(), "amax")  # children give nothing
        gives_BNK = (nearest_BNK <= reach_BN[..., None]) & ~drafted_BM.view_as(far_BNK).bool()
        given_BNK = torch.where(gives_BNK, p_BNV[..., : self.count], 0.0)
        mine_BNK = (winner_BNK.gather(1, wide_BNK) == index_BN1) & real_BN[..., None]
        received_BN = (given_BNK.gather(1, wide_BNK) * mine_BNK).sum(-1)
        mass_BM = (-given_BNK).flatten(1).scatter_add(1, place_BN, received_BN)  # twins receive 0: one order only
        cost_BN = (given_BNK * torch.where(gives_BNK, nearest_BNK, 0.0)).sum(-1)
        return MassMoves(mass_BM.view_as(far_BNK), given_BNK.sum(-1), cost_BN)

    def children(self, draft: Draft) -> Tensor:
        """(B, N) whether a node is a drafted code: neither the root, nor absent, nor grammar."""
        below_BN = (draft.tree.parent >= 0) & (draft.value < self.count)
        return below_BN if draft.real is None else below_BN & draft.real


def transport(gap_BNK: Tensor, clusters: Clusters, reach_BN: Tensor) -> MassMoves:
    """The transport of mass between codes with a positive gap, which receive, and codes with a negative one.

    In a cluster whose radius is within reach all that can be moved is moved, in proportion to what each of its codes
    still needs or has. The cost is that mass times the root of the mean squared distance of the codes so coupled, which
    is at least their mean distance.
    """
    padded_BNP = torch.nn.functional.pad(gap_BNK, (0, clusters.order.shape[0] - gap_BNK.shape[-1]))[..., clusters.order]
    need_BNP, spare_BNP = padded_BNP.clamp(min=0), (-padded_BNP).clamp(min=0)
    start_BNP, cost_BN = padded_BNP, torch.zeros_like(reach_BN)
    for level in clusters.levels:
        codes_CSE, norm_CS, radius_C = (table.to(gap_BNK.dtype) for table in level)
        need_BNCS, spare_BNCS = (part.unflatten(-1, norm_CS.shape) for part in (need_BNP, spare_BNP))
        needed_BNC, spared_BNC = need_BNCS.sum(-1), spare_BNCS.sum(-1)
        mass_BNC = torch.minimum(needed_BNC, spared_BNC) * (radius_C <= reach_BN[..., None])
        got_BNCS = need_BNCS * (mass_BNC / needed_BNC.clamp(min=TINY))[..., None]
        gave_BNCS = spare_BNCS * (mass_BNC / spared_BNC.clamp(min=TINY))[..., None]
        squares_BNC = torch.einsum("bncs,cs->bnc", got_BNCS + gave_BNCS, norm_CS)
        to_BNCE, from_BNCE = (torch.einsum("bncs,cse->bnce", part, codes_CSE) for part in (got_BNCS, gave_BNCS))
        cost_BN = cost_BN + (squares_BNC * mass_BNC - 2 * (to_BNCE * from_BNCE).sum(-1)).clamp(min=0).sqrt().sum(-1)
        need_BNP, spare_BNP = need_BNP - got_BNCS.flatten(-2), spare_BNP - gave_BNCS.flatten(-2)
    moved_BNK = (start_BNP - need_BNP + spare_BNP)[..., clusters.place]
    return MassMoves(moved_BNK, moved_BNK.clamp(min=0).sum(-1), cost_BN)


def within(wanted_BN: Tensor, allowed_BN: Tensor, ancestor_BNN: Tensor, parent_BN: Tensor) -> Tensor:
    """(B, N) of the wanted, what nodes may spend so that no path from the root has spent more than is allowed at its
    end. allowed_BN doesn't fall along a path; earlier nodes come first.
    """
    summed_BN = (ancestor_BNN.to(wanted_BN.dtype) @ wanted_BN[..., None])[..., 0]  # of a node and those above
    over_BNN = (summed_BN - allowed_BN)[:, None, :].expand(-1, wanted_BN.shape[1], -1)
    over_BN = over_BNN.masked_fill(~ancestor_BNN, -torch.inf).amax(-1).clamp(min=0.0)
    total_BN = summed_BN - over_BN
    before_BN = total_BN.gather(1, parent_BN.clamp(min=0).expand_as(total_BN)) * (parent_BN >= 0)
    return torch.minimum((total_BN - before_BN).clamp(min=0.0), wanted_BN)
