"""Equality of accelerated and plain decoding, in three tiers.

* Token-exact, float32: outputs are compared id by id, no exceptions (in `tests/test_contract.py` for every family
  and drafter).
* Low precision: passes of different shape round differently, so near ties may be resolved differently. The same tokens
  are fed one at a time and in draft-shaped passes; the difference of the logits is the size of rounding effects. A
  different output is benign only if the margin at the first divergence is not larger than that.
* Enumerated distribution: sampling with an exact rule has the target's distribution; `tests/test_law.py` enumerates it.

Targets and requests are arguments (`types.Target`, `types.Request`). Shapes: B rows, T tokens, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from visspec import tree as trees
from visspec.distributions import categorical
from visspec.loop.decode import retire
from visspec.types import Draft, Outcome, Request, Sampling, Target, Tree

LAW = "tests/test_law.py"  # enumerates the distribution of every exact rule
SUSPECT = 16.0  # a gap of more rounding steps of the largest logit is not due to rounding
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@torch.inference_mode()
def forced_logits(
    target: Target, request: Request, tokens: Sequence[Sequence[int]], shape: Tree | None = None
) -> list[Tensor]:
    """Teacher-forced logits of a target before each given token, (T_b, V) float32 on the CPU for every row, unwarped.

    shape None feeds one token per pass. With a tree (shared by all rows) passes have that shape: the tokens are placed
    on its first longest path and are all kept; its other nodes repeat the token of their depth, and are dropped.
    """
    state, scores = target.prefill(replace(request, sampling=Sampling(), generators=None, stop=None, on_tokens=None))
    device = state.pending.device
    shape = trees.chain(0, str(device)) if shape is None else shape
    depths = shape.depth[0].tolist()
    spine = trees.paths(shape)[0][depths.index(shape.levels)].tolist()
    found = [[categorical(scores.distribution).logits[b, -1].float().cpu()] for b in range(len(tokens))]
    state.position = state.position + 1
    while True:
        state.finished.update({r for r in state.rows if len(found[r]) == len(tokens[r])})
        retire(state, target, None)
        if not state.live:
            return [torch.stack(row) for row in found]
        ahead = [tokens[r][len(found[r]) - 1 :] for r in state.rows]
        nodes = [[row[min(d, len(row) - 1)] for d in depths] for row in ahead]
        draft = Draft(torch.tensor(nodes, device=device), shape)
        state.pending = draft.value[:, 0]
        scores = target.verify(state, draft)
        outcome = Outcome([], [])
        for b, (r, row) in enumerate(zip(list(state.rows), ahead)):
            path = spine[: len(row) - 1]
            outcome.path.append(path)
            outcome.tokens.append(list(row[1 : len(path) + 1]))
            found[r] += categorical(scores.distribution).logits[b, path].float().cpu().unbind()
            state.tokens[r] = list(tokens[r][: len(found[r])])
        target.commit(state, draft, outcome)
        state.position = state.position + torch.tensor([len(p) for p in outcome.path], device=device)


@dataclass
class Gap:
    """Difference between two computations of the same logits, over everything passed to `add`."""

    largest: float = 0.0  # |difference| of a logit
    total: float = 0.0  # sum of |difference|
    count: int = 0  # logits compared
    shift: float = 0.0  # maximum change of a margin between two tokens: largest minus smallest signed difference
    scale: float = 0.0  # largest |logit|
    positions: int = 0
    flips: list[dict[str, Any]] = field(default_factory=list)  # positions whose best token differs

    def add(self, one: Tensor, other: Tensor, **where: int) -> None:
        """Logits (T, V) of the same T positions. `where` is added to the record of each flip."""
        moved = torch.where(one.isfinite() & other.isfinite(), other - one, torch.zeros(()))
        if len(moved) == 0:
            return
        self.largest = max(self.largest, float(moved.abs().max()))
        self.total += float(moved.abs().sum(dtype=torch.float64))
        self.count += moved.numel()
        self.shift = max(self.shift, float((moved.amax(-1) - moved.amin(-1)).max()))
        self.scale = max(self.scale, float(torch.where(one.isfinite(), one.abs(), 0.0).max()))
        self.positions += len(one)
        for t in (one.argmax(-1) != other.argmax(-1)).nonzero().flatten().tolist():
            first, second = one[t].topk(2).values.tolist()
            self.flips.append({**where, "index": t, "margin": first - second})

    def in_eps(self, dtype: torch.dtype) -> float:
        """The largest difference in rounding steps of the largest logit."""
        return self.largest / (torch.finfo(dtype).eps * self.scale) if self.scale else 0.0


def first_divergence(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token at which two outputs differ, a missing token included; None if they are equal."""
    if list(plain) == list(other):
        return None
    shared = min(len(plain), len(other))
    return next((t for t in range(shared) if plain[t] != other[t]), shared)


def divergence(plain: Sequence[int], other: Sequence[int], distribution: Tensor, **where: int) -> dict[str, Any] | None:
    """The first divergence, and the margin of the plain token in the plain distribution (T, V) before it.

    `margin` is None if one output only ends before the other.
    """
    t = first_divergence(plain, other)
    if t is None:
        return None
    ended = t >= min(len(plain), len(other))
    margin = None if ended else float(distribution[t, plain[t]] - distribution[t, other[t]])
    return {**where, "index": t, "margin": margin}


class Tiers:
    """Collects the outputs of prompts: `add` outputs, `force` those to analyse, then `record`."""

    def __init__(self, dtype: torch.dtype, greedy: bool = True):
        self.dtype, self.greedy = dtype, greedy
        self.gap = Gap()
        self.nodes: set[int] = set()
        self.identical, self.compared, self.forced = 0, 0, 0
        self.divergences: list[dict[str, Any]] = []

    @property
    def low(self) -> bool:
        return self.dtype in LOW.values()

    def add(self, plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> bool:
        """Add the rows of one prompt's outputs. Returns whether they differ."""
        self.identical += [list(r) for r in plain] == [list(r) for r in other]
        self.compared += 1
        return [list(r) for r in plain] != [list(r) for r in other]

    def force(
        self,
        target: Target,
        request: Request,
        plain: Sequence[Sequence[int]],
        other: Sequence[Sequence[int]],
        shapes: Sequence[Tree],
        prompt: int,
    ) -> None:
        """Feed the plain output of a prompt again, one token at a time and in passes of each shape."""
        laws = forced_logits(target, request, plain)
        self.forced += 1
        for shape in shapes:
            self.nodes.add(shape.size)
            for row, (law, moved) in enumerate(zip(laws, forced_logits(target, request, plain, shape))):
                self.gap.add(law, moved, prompt=prompt, row=row, nodes=shape.size)
        rows = enumerate(zip(plain, other, laws))
        found = [divergence(p, o, law, prompt=prompt, row=row) for row, (p, o, law) in rows]
        self.divergences += [entry for entry in found if entry is not None]

    def record(self) -> dict[str, Any]:
        """The `equality` object of a bench's JSON. `benign` is None for sampled outputs, which depend on noise."""
        gap, steps = self.gap, self.gap.in_eps(self.dtype)
        suspect = steps > SUSPECT
        for entry in self.divergences:
            near = entry["margin"] is not None and entry["margin"] <= gap.shift
            entry["benign"] = (near and self.low and not suspect) if self.greedy else None
        differ = self.compared - self.identical
        explained = bool(self.divergences) and all(e["benign"] for e in self.divergences)
        benign = (differ == 0 or (self.greedy and explained)) and not (suspect and self.low)
        measured = {"prompts": self.forced, "positions": gap.positions, "nodes_per_pass": sorted(self.nodes)}
        measured |= {"max": gap.largest, "mean": gap.total / max(gap.count, 1), "margin_shift": gap.shift}
        measured |= {"in_eps": steps, "suspect": suspect, "argmax_differs": len(gap.flips), "flips": gap.flips}
        tier = "teacher-forced" if self.low else "token-exact"
        record: dict[str, Any] = {"tier": tier, "against": "plain", "enumerated_law": LAW}
        record |= {"dtype": str(self.dtype).removeprefix("torch."), "first_divergences": self.divergences}
        record |= {"identical": self.identical, "compared": self.compared, "gap": measured if self.forced else None}
        return record | {"benign": benign if self.greedy or differ == 0 else None}


def in_words(record: dict[str, Any]) -> str:
    """The verdict of a record as one line."""
    same = f"{record['identical']} of {record['compared']} prompts equal plain decoding in {record['dtype']}"
    gap = record["gap"]
    if gap is None:
        return same
    moved = (
        f"{same}; same tokens fed in passes of {', '.join(map(str, gap['nodes_per_pass']))} nodes: logits move by "
        f"{gap['max']:.2g} at most, {gap['mean']:.2g} on average, best token differs at {gap['argmax_differs']} of "
        f"{gap['positions']} positions"
    )
    if gap["suspect"] and record["tier"] == "teacher-forced":
        return f"{moved}; SUSPECT: {gap['in_eps']:.0f} rounding steps, more than rounding explains"
    first = record["first_divergences"]
    if not first:
        return moved
    if record["benign"] is None:
        return f"{moved}; sampled outputs are not judged"
    wrong = sum(not e["benign"] for e in first)
    widest = max((e["margin"] for e in first if e["margin"] is not None), default=float("nan"))
    verdict = "all near ties" if not wrong else f"NOT BENIGN: {wrong} of {len(first)} are no near ties"
    reach = f"widest margin {widest:.2g}, rounding moves margins by up to {gap['margin_shift']:.2g}"
    return f"{moved}; first divergences: {verdict} ({reach})"
