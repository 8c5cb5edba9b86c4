"""Speed of several ways to decode the same prompts: interleaved, paired, with intervals (rules of docs/results.md).

An *arm* is a callable prompt -> ArmRun. After a warm-up, arms run prompt by prompt in alternating order. Ratios are
computed prompt by prompt, so that changes in the machine's speed affect all arms equally.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm

from visspec.loop.stats import acceptance_by_depth, by_depth
from visspec.types import Round, Trace


@dataclass
class ArmRun:
    """One arm's output for one prompt. Ids are the model's output after stop trimming, not re-tokenised text."""

    seconds: float
    tokens: list[list[int]]  # per row
    first: float = 0.0  # seconds until the first token (preparation, vision tower, prefill)
    stages: dict[str, float] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    drift: float | None = 0.0  # per token; None if it is not measured
    origin: list[list[str]] = field(default_factory=list)  # per row: the origin of each token (`types.Trace`)
    prompt: int = -1  # index of the prompt; set by `interleave`

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @classmethod
    def of_trace(cls, seconds: float, tokens: list[list[int]], trace: Trace, first: float, **more: Any) -> ArmRun:
        """Create a run of our loop. Time that its trace has not measured is `other`."""
        stages = dict(trace.times) | {"other": seconds - sum(trace.times.values())}
        return cls(seconds, tokens, first, stages, list(trace.rounds), **more)


Arm = Callable[[Any], ArmRun]
Kind = TypeVar("Kind", bound=Arm)
Name = TypeVar("Name")


def turns(names: Sequence[Name], count: int) -> Iterator[tuple[int, list[Name]]]:
    """Yield (number, names in the order of this turn). Every second turn is reversed, and the first place rotates."""
    for i in range(count):
        order = list(names) if i % 2 == 0 else list(names)[::-1]
        shift = (i // 2) % len(names)
        yield i, order[shift:] + order[:shift]


def interleave(
    arms: Mapping[str, Arm], prompts: Sequence[Any], warmup: Sequence[Any] = (), title: str | None = None
) -> tuple[dict[str, list[ArmRun]], list[str]]:
    """Run every arm on every prompt. Returns the runs by arm, and the failures; a prompt that fails in one arm is
    excluded from all. Prompts in `warmup` run first and are not measured. They must not be in `prompts`, because
    drafters may remember answers. With a `title`, a progress bar is shown.
    """
    names = list(arms)
    for prompt in warmup:
        for name in names:
            with contextlib.suppress(Exception):
                arms[name](prompt)
    runs: dict[str, list[ArmRun]] = {name: [] for name in names}
    failures: list[str] = []
    bar = tqdm(prompts, desc=title, leave=False, disable=title is None)
    for (i, order), prompt in zip(turns(names, len(prompts)), bar):
        try:
            group = {name: arms[name](prompt) for name in order}
        except Exception as error:
            failures.append(f"prompt {i}: {type(error).__name__}: {error}")
            continue
        for name in names:
            group[name].prompt = i
            runs[name].append(group[name])
    return runs, failures


def fastest(arms: Sequence[Kind], prompts: Sequence[Any]) -> Kind:
    """Return the arm with the lowest time on a few prompts, after one for the warm-up: a baseline at its best setting.
    Arms that raise ValueError or RuntimeError are excluded; if none is left, the error is raised.
    """
    seconds: list[tuple[float, int]] = []
    refusal: Exception | None = None
    for i, arm in enumerate(arms):
        try:
            arm(prompts[0])
            seconds.append((sum(arm(prompt).seconds for prompt in prompts), i))
        except (ValueError, RuntimeError) as error:
            refusal = error
    if refusal is not None and not seconds:
        raise refusal
    return arms[min(seconds)[1]]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def bootstrap(values: Sequence[float], seed: int = 0, resamples: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean, resampling prompts with replacement."""
    if len(values) < 2:
        return (float("nan"), float("nan"))
    rng, logs = random.Random(seed), [math.log(v) for v in values]
    means = sorted(sum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(resamples))
    return math.exp(means[int(0.025 * resamples)]), math.exp(means[int(0.975 * resamples)])


def compare(slow: Sequence[ArmRun], fast: Sequence[ArmRun], per_token: bool = False) -> dict[str, Any]:
    """Return the speed-up of `fast` over `slow`, pair by pair; `per_token` for outputs of different lengths."""

    def cost(run: ArmRun, seconds: float) -> float:
        return seconds / max(run.count, 1) if per_token else seconds

    whole = [cost(s, s.seconds) / cost(f, f.seconds) for s, f in zip(slow, fast)]
    decoded = [(s, f) for s, f in zip(slow, fast) if s.seconds > s.first and f.seconds > f.first]
    decode = [cost(s, s.seconds - s.first) / cost(f, f.seconds - f.first) for s, f in decoded]
    total = sum(s.seconds for s in slow) / sum(f.seconds for f in fast) if fast else float("nan")
    ratios = {"speedup": geometric_mean(whole), "speedup_ci95": list(bootstrap(whole))}
    ratios |= {"speedup_decode_only": geometric_mean(decode), "speedup_total_time": total}
    same = sum(s.tokens == f.tokens for s, f in zip(slow, fast))
    return ratios | {"ratios": [round(r, 4) for r in whole], "identical": same, "compared": len(whole)}


def over(name: str, slow: Sequence[ArmRun], fast: Sequence[ArmRun], per_token: bool = False) -> dict[str, Any]:
    """Return the speed-up of `fast` over `slow` and its interval, as fields of this name."""
    ratios = compare(slow, fast, per_token)
    return {name: ratios["speedup"], f"{name}_ci95": ratios["speedup_ci95"]}


def acceptance(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """Return accepted / reached at each depth over all runs, and the number of reached nodes."""
    rounds = [entry for run in runs for entry in run.rounds]
    reached = [n for n in by_depth(rounds)[0] if n]
    return {"acceptance_by_depth": acceptance_by_depth(rounds), "reached_by_depth": reached}


def tau(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """Return tokens per target pass, bonus included, over all rounds (micro) and averaged over prompts (macro)."""
    passes = [sum(len(g) for _, g, *_ in r.rounds) for r in runs]
    committed = [sum(sum(g) for _, g, *_ in r.rounds) for r in runs]
    micro = sum(committed) / max(sum(passes), 1)
    macro = [g / p for g, p in zip(committed, passes) if p]
    nfe = sum(len(r.rounds) + 1 for r in runs) / max(len(runs), 1)
    figures = {"tau": micro, "tau_without_bonus": micro - 1.0, "tau_macro": sum(macro) / max(len(macro), 1)}
    return figures | {"nfe": nfe}


def drift(runs: Sequence[ArmRun]) -> float | None:
    """Return the mean drift per token; None if it was not measured."""
    values = [run.drift for run in runs if run.drift is not None]
    return sum(values) / max(len(values), 1) if len(values) == len(runs) else None


def ideal(plain: Sequence[ArmRun], fast: Sequence[ArmRun]) -> dict[str, Any]:
    """Return the maximum decode speed-up for tau at the measured costs, in units of one plain one-token pass. ideal =
    tau / (v + c + o): v a verification pass, c drafting, o the rest of a round. The terms between it and tau are
    listed; `gap` is the effect of removing each term alone.
    """
    unit = sum(r.stages.get("verify", 0.0) for r in plain) / max(sum(len(r.rounds) for r in plain), 1)
    unit = unit or float("nan")  # if all prompts failed, every figure is NaN
    rounds = max(sum(len(r.rounds) for r in fast), 1)

    def share(*names: str) -> float:
        return sum(r.stages.get(n, 0.0) for r in fast for n in names) / rounds / unit

    v, c, o = share("verify"), share("draft", "observe", "draft_prefill"), share("accept", "commit")
    reach = tau(fast)["tau"]
    best = reach / (v + c + o)
    gap = {"tau": reach, "after_verify": reach / v, "after_draft": reach / (v + c), "after_host": best}
    costs = {"verify_over_plain": v, "draft_over_plain": c, "host_over_plain": o}
    return {"ideal_speedup": best, **costs, "gap": gap}


def figures(
    stock: Sequence[ArmRun], plain: Sequence[ArmRun], fast: Sequence[ArmRun], per_token: bool = False
) -> dict[str, Any]:
    """Return the fields of docs/results.md that records of all benches share. `speedup` and `identical` are relative to
    `stock`, the others to `plain`, our own loop without a drafter.
    """
    record = compare(stock, fast, per_token) | tau(fast) | acceptance(fast) | ideal(plain, fast)
    record |= {"nfe_plain": tau(plain)["nfe"], **over("over_plain", plain, fast)}
    return record | {"drift_per_token": drift(fast)}


def in_words(speedup: float, reach: float = 0.0) -> str:
    """Format a ratio; below 1 it is a slowdown. `reach` is tau if the ratio is relative to our own plain loop, where a
    larger ratio is suspect; for other baselines tau is not a bound (0).
    """
    if math.isnan(speedup):
        return "not measured"
    if speedup < 1.0:
        return f"a slowdown: {1 / speedup:.2f} times the time"
    if speedup > reach > 0:
        return f"{speedup:.2f} times faster, SUSPECT: more than tau {reach:.2f}"
    return f"{speedup:.2f} times faster"


def suspicion(over_plain: float | None, ci95: Sequence[float] | None, reach: float) -> str:
    """Return a warning, or "", if the interval of the ratio over our plain loop exceeds tau, which shows an error."""
    if over_plain is None or not 0 < reach < over_plain:
        return ""
    low = ci95[0] if ci95 else float("nan")  # no interval from a single prompt
    return "" if low <= reach else f"over our plain loop {in_words(over_plain, reach)}"
