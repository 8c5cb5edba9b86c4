"""The structure of a trained drafter's drafts, a chain or a tree of fixed size: measured, chosen and stored.

The drafter's config.json contains it, and `accelerate(model, folder)` uses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from visspec import registry
from visspec.api.text.accelerate import accelerate
from visspec.api.training.export import say
from visspec.eval.bench import paired
from visspec.eval.bench.clock import seconds_of, waiter
from visspec.io.checkpoint import CONFIG, read_json
from visspec.io.files import write_json
from visspec.types import Drafter, Request, State

CHAIN = "tree=chain"
TREES = ("width=3,nodes=8", "width=4,nodes=16")  # compared with a chain and the preset's own structure
LEAST, MOST = 4, 9  # number of held-out prompts to compare on; the first one warms up
TOKENS = 128  # tokens of each answer
HeldOut = Callable[[float], Iterable[Request]]  # requests for validation, by temperature


def name_of(structure: dict[str, Any]) -> str:
    """Return a structure as options of a drafter's name."""
    return registry.joined("", structure)[1:] or CHAIN


def measure(decode: Callable[[Request], State], requests: Iterable[Request]) -> float:
    """Return tau over all requests, as in `Stats`: tokens per target pass, bonus token included."""
    rounds = [one for request in requests for one in decode(request).trace.rounds]
    return round(sum(sum(one.committed) for one in rounds) / max(sum(len(one.committed) for one in rounds), 1), 3)


def taus(model: PreTrainedModel, drafter: Drafter, held_out: HeldOut) -> dict[str, float]:
    """Return tau at temperatures 0 and 1, decoded as by `accelerate(model, drafter, adaptive=False)`."""
    decode = accelerate(model, drafter, adaptive=False, graphs=False, debug=True).setup.decode
    return {name: measure(decode, held_out(heat)) for name, heat in (("tau_greedy", 0.0), ("tau_sampled", 1.0))}


def choose(
    model: PreTrainedModel, folder: Path, prompts: Sequence[Callable[..., Request]], held_out: HeldOut
) -> dict[str, Any]:
    """Measure structures of a saved drafter, store the fastest one in its folder, and print and return its figures.

    They answer the same prompts in turns, with the default draft-length policy. A tree must be faster than the chain by
    more than the 95 % interval over prompts. `prompts` are requests of one row, by number and temperature; `held_out`
    are requests for `taus`.
    """
    say(f"Comparing structures of drafts on {len(prompts) - 1} held-out prompts.")
    config = read_json(folder, CONFIG)
    names = list(dict.fromkeys([CHAIN, *TREES, name_of(config["structure"])]))
    setups = {name: accelerate(model, f"{folder.resolve()}:{name}").setup for name in names} | {
        "": accelerate(model, None).setup
    }

    def answer(name: str, prompt: Callable[..., Request]) -> paired.ArmRun:
        seconds, state = seconds_of(partial(setups[name].decode, prompt(0, 0.0)), waiter(model.device))
        return paired.ArmRun.of_trace(seconds, state.tokens, state.trace, 0.0)

    runs, failures = paired.interleave({name: partial(answer, name) for name in setups}, prompts[1:], prompts[:1])
    for failure in failures:
        say(failure)
    rows = {name: {"structure": name} | paired.over("speedup", runs[""], runs[name]) for name in names}
    for name in names:
        print(json.dumps(rows[name] | {"tau_adaptive": paired.tau(runs[name])["tau"]}))
    faster = [name for name in names if paired.compare(runs[CHAIN], runs[name])["speedup_ci95"][0] > 1]
    best = max(faster, key=lambda name: rows[name]["speedup"], default=CHAIN)
    write_json(folder / CONFIG, config | {"structure": registry.parse(f":{best}")[1]})
    figures = rows[best] | taus(model, registry.drafter(folder.resolve(), model)[0], held_out)
    print(json.dumps(figures))
    return figures
