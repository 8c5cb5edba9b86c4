"""`visspec bench rules`: tokens a pass, drift and displacement of acceptance rules, on simulated distributions.

What a relaxed rule buys depends on how flat distributions are, and included models are sharper than those of the
papers. No model is run and nothing is timed; the rules, the trees and the loop are the library's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from tqdm import tqdm

from visspec.api import zoo
from visspec.api.simulation import SimulatedDrafter, SimulatedTarget, Simulation
from visspec.cli.arguments import Positive
from visspec.cli.bench import BenchOptions, Cell, table
from visspec.io.options import option
from visspec.io.provenance import provenance
from visspec.loop.draft_length import FixedLength
from visspec.loop.setup import DecodingSetup, build_setup
from visspec.loop.stats import Stats

EXACT = ["exact", "rejection", "block"]
LANTERN = ["lantern:k=100,delta=0.1", "lantern:k=1000,delta=0.4", "lantern_plus:k=10,lam=4"]
OTHERS = ["grouped:group=8", "cool:omega=1.1,nu=0.7", "typical"]
VIEW: dict[str, Cell] = {
    "rule": "{rule}",
    "structure": "{structure}",
    "entropy": "{entropy:g}",
    "distance": "{distance:g}",
    "tau": "{tau:.2f}",
    "bound": "{bound:.2f}",
    "drift": "{drift:.3f}",
    "displacement": "{displacement:.3f}",
}


@dataclass(kw_only=True)
class Options(BenchOptions):
    entropy: list[float] = option("of the target's distributions, in nats", [0.5, 1.5, 3.0, 5.0, 7.0])
    distance: list[float] = option("total variation of the drafter's distributions from the target's", [0.3])
    rule: list[str] = option("acceptance rules", EXACT + LANTERN + OTHERS)
    structure: list[str] = option("levels of a chain, or nodes a depth of a tree", ["4", "16", "4-4-4"])
    codes: Positive = option(default=16384)
    rows: Positive = option("sequences", 8)
    tokens: Positive = option("of a sequence", 48)
    seed: int = option(default=0)


def run(arguments: Options) -> None:
    """Print and write the record: a row for each entropy, distance, rule and structure that go together."""
    arguments.begin()
    rows = list(measure(arguments))
    record = {"bench": "rules", "rows": rows, "seed": arguments.seed, "n_prompts": arguments.rows}
    record |= {"max_new_tokens": arguments.tokens, "temperature": 1.0, "provenance": provenance()}
    arguments.end(record, table("Rules on simulated distributions", rows, VIEW, left=("structure",)))


def measure(arguments: Options) -> Iterator[dict[str, Any]]:
    """The rows of the record. A rule that takes no trees has none for them."""
    cases = list(product(arguments.entropy, arguments.distance))
    with tqdm(total=len(cases) * len(arguments.rule) * len(arguments.structure), leave=False) as bar:
        for entropy, distance in cases:
            sizes = arguments.rows, arguments.tokens
            simulation = Simulation(arguments.codes, entropy, distance, *sizes, arguments.seed)
            for structure, rule in product(arguments.structure, arguments.rule):
                bar.update()
                if structure.isdigit() or not zoo.acceptance(rule).traits.chains_only:
                    yield row_of(simulation, rule, structure, arguments)


def row_of(simulation: Simulation, rule: str, structure: str, arguments: Options) -> dict[str, Any]:
    """One rule on drafts of one structure. `bound` is that of exact rules on chains, None for trees."""
    setup = setup_of(simulation, rule, structure)
    stats = Stats.of(setup.decode(simulation.request(arguments.tokens, arguments.seed)), setup)
    row: dict[str, Any] = {"entropy": simulation.entropy, "distance": simulation.distance, "codes": simulation.codes}
    row |= {"rule": rule, "structure": structure, "guarantee": setup.guarantee, "tau": stats.tau}
    row |= {"bound": simulation.bound(int(structure)) if structure.isdigit() else None}
    return row | {"drift": stats.drift_per_token, "displacement": stats.displacement_per_token}


def setup_of(simulation: Simulation, rule: str, structure: str) -> DecodingSetup:
    """Raises ValueError for a rule or a structure that there is none of."""
    levels, tree = (int(structure), "") if structure.isdigit() else (1, structure)
    drafter, target = SimulatedDrafter(simulation, levels, tree), SimulatedTarget(simulation)
    return build_setup(drafter, "simulated", zoo.acceptance(rule), None, lambda traits: target, length=FixedLength)
