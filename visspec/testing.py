"""Contract checks for drafters and acceptance rules, for use in the tests of their authors.

def test_bigram():
    visspec.testing.check_drafter(Bigram(), model, tokenizer(prompts, padding=True, return_tensors="pt"))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from visspec import registry, tree
from visspec.api.text.accelerate import Accelerated, accelerate
from visspec.distributions import Categorical, draw
from visspec.types import Acceptance, Draft, Scores

_PLAIN: WeakKeyDictionary[Any, dict] = WeakKeyDictionary()


def check_drafter(
    drafter: registry.DrafterSpec,
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int = 14,
    **options: Any,
) -> Accelerated:
    """Check that a drafter does not change the generated text.

    Greedy tokens must equal those of transformers, and sampled tokens those of our loop without a drafter and with the
    same seed. No draft may be invalid or raise an exception.

    Args:
        drafter: Any value that `visspec.accelerate` takes.
        model: The target, in float32.
        inputs: Arguments of `generate`, with `input_ids` (B, L). Rows of different lengths also check that a row does
            not depend on its batch.
        max_new_tokens: Tokens to generate in each row.
        options: Further options of `visspec.accelerate`.

    Returns:
        The accelerated model. Its `last_stats` report what was drafted.

    Raises:
        AssertionError: If the contract is broken.
    """
    quick = accelerate(model, drafter, **{"adaptive": False, **options})
    greedy, expected, seeded, sampled = _plain(model, inputs, max_new_tokens)
    for arguments, reference in ((greedy, expected), (seeded, sampled)):
        result = quick.run(**inputs, **arguments)
        assert torch.equal(result.output, reference), f"{quick.name} changes the tokens of {arguments}."
        assert result.stats.faults == 0, f"{result.stats.faults} drafts of {quick.name} are invalid."
    return quick


def _plain(model: Any, inputs: Mapping[str, Tensor], new: int) -> tuple[dict, Tensor, dict, Tensor]:
    answers, key = _PLAIN.setdefault(model, {}), (new, *(value.numpy().tobytes() for value in inputs.values()))
    if key not in answers:
        greedy = {"max_new_tokens": new, "do_sample": False}
        seeds = list(range(3, 3 + len(inputs["input_ids"])))
        seeded = {"max_new_tokens": new, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0, "seed": seeds}
        sampled = accelerate(model, None).generate(**inputs, **seeded)
        answers[key] = greedy, model.generate(**inputs, **greedy), seeded, sampled
    return answers[key]


def check_rule(rule: str | Acceptance, vocab: int = 6, rows: int = 4000, pairs: int = 8) -> None:
    """Check the guarantee of an acceptance rule for ids, by counting tokens.

    One token is drafted in each row. An exact rule must keep the target's distribution; an approximate rule must report
    a drift that is at least the measured one.

    Args:
        rule: A rule, or its name with options.
        vocab: Size of the vocabulary.
        rows: Samples for each pair of distributions.
        pairs: Number of random pairs of a target's and a drafter's distribution.

    Raises:
        AssertionError: If the guarantee is broken.
    """
    for seed in range(pairs):
        _check_guarantee(registry.rule(rule) if isinstance(rule, str) else rule, vocab, rows, seed)


def _check_guarantee(rule: Acceptance, vocab: int, rows: int, seed: int) -> None:
    """Check one pair of distributions. A correct rule fails once in a million times."""
    generator = torch.Generator().manual_seed(seed)
    p_V, q_V = torch.randn(2, vocab, generator=generator).mul(1.5).softmax(-1)
    noise = rule.make_noise([torch.Generator().manual_seed(seed + row) for row in range(rows)], vocab)
    q, drafted_B = None, torch.full((rows,), int(q_V.argmax()))
    if rule.traits.judges_draws:
        drafted_B = draw(q_V.expand(rows, vocab), torch.rand(rows, generator=generator))
        q = Categorical(p=torch.stack([torch.zeros(vocab), q_V]).expand(rows, 2, vocab))
    draft = Draft(torch.stack([torch.zeros_like(drafted_B), drafted_B], 1), tree.chain(1), q)
    verdict = rule(draft, Scores(Categorical(p_V.log().expand(rows, 2, vocab))), noise)
    first_B = torch.where(verdict.length == 2, drafted_B, verdict.next)
    found_V = torch.bincount(first_B, minlength=vocab) / rows
    error_V = 5 * (p_V * (1 - p_V) / rows).sqrt()
    name = type(rule).__name__
    if rule.traits.guarantee == "approximate":
        assert verdict.drift is not None, f"{name} is approximate and measures no drift."
        drift, distance = float(verdict.drift.mean()), 0.5 * float((found_V - p_V).abs().sum())
        assert distance <= drift + 0.5 * float(error_V.sum()), f"{name}: drift {drift:.3f}, but it is {distance:.3f}"
    else:
        assert ((found_V - p_V).abs() <= error_V).all(), f"{name} gives {found_V.tolist()}, not {p_V.tolist()}"
