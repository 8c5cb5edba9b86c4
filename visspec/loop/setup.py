"""A compatible combination of target, drafter, rule, draft-length policy and order, checked once before any pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from visspec.accept.graphed_rule import GraphedRule
from visspec.distributions import Categorical
from visspec.loop.draft_length import AdaptiveLength, DraftLengthPolicy, FixedLength
from visspec.loop.orders import Raster, RejectedRegions
from visspec.loop.safe_drafter import SafeDrafter
from visspec.types import GUARANTEES, Acceptance, Drafter, DrafterTraits, Order, Request, State, Target

SHAPES = 64  # maximum number of draft shapes with a recorded verdict


@dataclass(frozen=True, eq=False)
class DecodingSetup:
    """A target with drafter, rule, draft-length policy and order. It decodes requests."""

    target: Any  # the `Target`, of the class that the caller built
    drafter: SafeDrafter | None
    name: str  # of the drafter
    rule: Acceptance
    length_policy: DraftLengthPolicy
    order: Order

    @property
    def passes(self) -> list[Any]:
        """The compilers and recorders of target and drafter."""
        passes = [self.target.passes, self.target.recorder]
        if self.drafter is not None:
            passes += [self.drafter.inner.passes, self.drafter.inner.recorder]
        return [each for each in passes if each is not None]

    @property
    def guarantee(self) -> str:
        """The weakest guarantee of target, rule and order."""
        guarantees = self.target.capabilities.guarantee, self.rule.traits.guarantee
        return min(guarantees, key=GUARANTEES.index) if self.order.raster else "approximate"

    def promises_tokens(self, greedy: bool) -> bool:
        """Return whether the tokens are those of plain decoding. A rule that is exact with its own uniform numbers only
        keeps the distribution, except in greedy decoding, which uses none.
        """
        return self.guarantee != "approximate" and (greedy or not self.rule.traits.judges_draws)

    def decode(self, request: Request) -> State:
        """Decode a batch. Returns the finished state."""
        return self.finish(self.order.decode(self.target, self.drafter, self.rule, request, self.length_policy))

    def finish(self, state: State) -> State:
        """Count the drafter's faults and release resources, also after an interrupted request."""
        self.target.finish(state)
        if self.drafter is not None:
            self.drafter.finish(state)
        return state


def build_setup(
    drafter: Drafter | None,
    name: str,
    rule: Acceptance,
    subject: object,
    make_target: Callable[[DrafterTraits], Target],
    *,
    order: Order | None = None,
    levels: int | None = None,
    length: Callable[[int], DraftLengthPolicy] | None = None,
    compile: bool = False,
    graphs: bool | None = False,
    debug: bool = False,
) -> DecodingSetup:
    """Build a setup and check that its parts fit together. Raises ValueError if they don't.

    Args:
        rule: The acceptance rule. It is bound here, so pass a copy.
        subject: The model or family that is passed to the drafter's `attach`.
        make_target: Builds the target for a drafter's traits.
        order: None for islands if drafter and rule support whole images, else raster.
        levels: Maximum draft depth.
        compile: Compile the target's passes, and the drafter's. If they are recorded, the target's layers.
        length: Makes the draft-length policy. By default `AdaptiveLength`; `FixedLength` for drafters of a fixed depth.
        graphs: Record the target's passes and the verdicts as CUDA graphs; None if that is faster.
        debug: Raise the drafter's exceptions.
    """
    if drafter is not None:
        drafter.attach(subject)
    traits = DrafterTraits() if drafter is None else drafter.traits
    target = make_target(traits)
    if graphs is not False:
        target.record(graphs, compile)
        rule.allow_graphs()
    if target.recorder is not None and rule.traits.distribution is Categorical and not isinstance(rule, GraphedRule):
        rule = GraphedRule(rule, SHAPES)
    if drafter is not None and target.recorder is not None:
        drafter.record()
    elif drafter is not None and compile:
        drafter.compile()
    rule.bind(target.capabilities)
    check(drafter, rule, target)
    guarded = None
    if drafter is not None:
        guarded = SafeDrafter(drafter, target.capabilities, target.device, rule.traits.chains_only, debug)
    if order is None:
        order = RejectedRegions() if traits.whole_images and rule.traits.whole_images else Raster()
    if not order.raster and target.capabilities.distribution is not order.distribution:
        kinds = order.distribution.__name__, target.capabilities.distribution.__name__
        raise ValueError(f"order: got {type(order).__name__} for {kinds[0]}, expected raster or one for {kinds[1]}.")
    check_order(order, target)
    length_policy = (length or (AdaptiveLength if traits.adaptive_depth else FixedLength))(levels or traits.levels)
    if not traits.adaptive_depth and not isinstance(length_policy, FixedLength):
        kind = type(length_policy).__name__
        raise ValueError(f"length: got {kind} for {type(drafter).__name__}, expected 'fixed', as its drafts are.")
    if drafter is not None:
        length_policy.structures = drafter.structures
        length_policy.counts_nodes = traits.counts_nodes
        length_policy.copies = min(traits.copies, levels or traits.copies)
    return DecodingSetup(target, guarded, name, rule, length_policy, order.bind(rule, guarded))


def check_order(order: Order, target: Target) -> None:
    """Raise ValueError if the target can't draw in this order."""
    name, free = type(order).__name__, target.capabilities.any_order
    if order.visits and not free:
        raise ValueError(f"order: got {name}, expected raster or none. Only any-order models draw in other orders.")
    if free and not order.raster:
        raise ValueError(f"order: got {name}, expected raster, spread, halton or a list of places.")


def check(drafter: Drafter | None, rule: Acceptance, target: Target) -> None:
    """Raise ValueError if the rule does not support the target's nodes or the drafter's drafts."""
    name, expected = type(rule.inner).__name__, target.capabilities.distribution
    if (judged := rule.traits.distribution) is not expected:
        raise ValueError(f"acceptance: {name} judges {judged.__name__} distributions, expected {expected.__name__}.")
    if drafter is None:
        return
    kind = type(drafter).__name__
    takes = target.capabilities
    if drafter.traits.trees and (rule.traits.chains_only or not takes.trees):
        drafter.restrict_to_chains()
    if (drafted := drafter.traits.distribution) is not expected:
        raise ValueError(f"drafter: {kind} drafts for {drafted.__name__} distributions, expected {expected.__name__}.")
    traits, trees = drafter.traits, drafter.traits.trees
    faults = {
        "runs layers of the target, expected one whose layers can be left out": traits.partial and not takes.layers,
        "drafts for any-order models, expected one for raster order, or text": traits.any_order and not takes.any_order,
        f"drafts trees, expected chains for the rule {name}": trees and rule.traits.chains_only,
        "drafts trees, expected chains for a target that takes no others": trees and not takes.trees,
        f"draws by numbers that serve several rounds, expected others for {name}": traits.own_noise
        and rule.traits.whole_chains,
        f"samples, expected point masses for the rule {name}": traits.samples and not rule.traits.judges_draws,
    }
    for fault in (fault for fault, is_wrong in faults.items() if is_wrong):
        raise ValueError(f"drafter: {kind} {fault}")
