"""Exact laws of small decoders, by enumeration in float64.

A target is `p`: for every context (a tuple of tokens) a law over V tokens. A *round* of a verifier is a list of
(probability, emitted tokens); `output_law` lets plain sampling go on behind it and gives the joint law of the next
`length` tokens, to be compared with `plain_law`. Exact rules: the total variation is below 1e-12.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import scipy.stats
import torch
from torch import Tensor

from tests.doubles import compact, drafted
from visspec import sampling
from visspec import tree as trees
from visspec.accept.exact import follow
from visspec.distributions import Categorical, residual
from visspec.sampling import Uniform
from visspec.types import Draft, Sampling, Verdict

Context = tuple[int, ...]
Distribution = Callable[[Context], Tensor]  # context -> (V,) float64
Rounds = Iterable[tuple[float, Context]]
PENDING = 0  # any id: the pending token belongs to the context that `p` already knows


def context_law(vocab: int, seed: int = 0, sharpness: float = 1.5) -> Distribution:
    """A law that depends on the whole context."""

    @functools.cache
    def p(context: Context) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**31)
        return torch.softmax(sharpness * torch.randn(vocab, generator=generator, dtype=torch.float64), -1)

    return p


def plain_law(p: Distribution, vocab: int, length: int) -> Tensor:
    """Joint law of `length` tokens of plain sampling, shape (V,) * length."""
    return output_law(p, [(1.0, ())], vocab, length)


def output_law(p: Distribution, rounds: Rounds, vocab: int, length: int) -> Tensor:
    """Joint law of the next `length` tokens when a round emits these tokens and plain sampling goes on."""
    law = torch.zeros((vocab,) * length, dtype=torch.float64)
    total: dict[Context, float] = {}
    for weight, emitted in rounds:
        key = tuple(emitted)[:length]
        total[key] = total.get(key, 0.0) + weight
    for emitted, weight in total.items():
        _spread(law, p, weight, emitted, length)
    return law


def _spread(law: Tensor, p: Distribution, weight: float, context: Context, length: int) -> None:
    if len(context) == length:
        law[context] += weight
        return
    for token, probability in enumerate(p(context).tolist()):
        _spread(law, p, weight * probability, (*context, token), length)


def total_variation(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a - b).abs().sum())


def contexts(parent: Sequence[int], tokens: Sequence[int]) -> list[Context]:
    result: list[Context] = [()]
    for n in range(1, len(parent)):
        result.append((*result[parent[n]], tokens[n]))
    return result


def choice_rounds(
    p: Distribution,
    parent: Sequence[int],
    tokens: Sequence[int],
    vocab: int,
    rule: Callable[[Draft, Tensor], Verdict] = follow,
    at_node: Callable[[int], Distribution] | None = None,
) -> list[tuple[float, Context]]:
    """Rounds of a rule that lets the target choose one token at every node: all combinations, in one batch.

    Choices are independent but for nodes of one context (twins): law and noise are the same, so the choice is too.
    `at_node` may give some nodes another law, for negative controls.
    """
    above = contexts(parent, [max(t, 0) for t in tokens])
    distinct = list(dict.fromkeys(above))
    laws = [(at_node(above.index(context)) if at_node else p)(context) for context in distinct]
    drawn = torch.tensor(list(itertools.product(range(vocab), repeat=len(distinct))))
    weight = torch.stack([law[drawn[:, i]] for i, law in enumerate(laws)]).prod(0)
    chosen = drawn[:, [distinct.index(context) for context in above]]
    ids = torch.tensor([[PENDING, *tokens[1:]]]).expand(len(chosen), -1)
    verdict = rule(drafted(ids, trees.static(tuple(parent))), chosen)
    rounds = []
    for w, path, length, following in zip(
        weight.tolist(), verdict.path.tolist(), verdict.length.tolist(), verdict.next.tolist()
    ):
        rounds.append((w, (*[tokens[n] for n in path[1:length]], following)))
    return rounds


def odds(shares):
    return float(torch.tensor(list(shares), dtype=torch.float64).prod())


def verdicts(p, committed, draft):
    """What rejection sampling can do with a tree: (tokens gained, the last one the rule's own, probability)."""
    parent, tokens = draft.tree.parent[0].tolist(), compact(draft)[0].tolist()
    result = []

    def judge(node, gained, reached):
        law = p((*committed, *gained))
        for child in (n for n in range(len(parent)) if parent[n] == node and tokens[n] >= 0):
            q, token = draft.q.p[0, child], tokens[child]
            keep = min(1.0, float(law[token] / q[token]))
            judge(child, (*gained, token), reached * keep)
            reached, law = reached * (1 - keep), residual(law, q)
            if reached <= 0:
                return
        result.extend(((*gained, y), reached * float(law[y])) for y in range(len(law)))

    judge(0, (), 1.0)
    return [v for v in result if v[1] > 0]


def split(spans, cuts):
    """Parts of spans of numbers between the cuts that are given, {index: cuts}, with their probability."""
    choices = []
    for i, (low, high) in enumerate(spans):
        ends = [low, *sorted({c for c in cuts.get(i, ()) if low < c < high}), high]
        choices.append([((a, b), (b - a) / (high - low)) for a, b in itertools.pairwise(ends)])
    for chosen in itertools.product(*choices):
        yield [span for span, _ in chosen], odds(w for _, w in chosen)


def chi_square(counts, distribution):
    """p-value of observed counts under a law; cells of tiny expectation are pooled."""
    counts, expected = counts.flatten().double(), distribution.flatten() * counts.sum()
    small = expected < 5
    assert counts[expected == 0].sum() == 0, "a token of probability zero was drawn"
    pooled = [torch.cat([x[~small], x[small].sum()[None]]) for x in (counts, expected)]
    keep = pooled[1] > 0
    return scipy.stats.chisquare(pooled[0][keep].numpy(), pooled[1][keep].numpy(), sum_check=False).pvalue


# --- Drafts whose numbers belong to positions. A branch is (committed tokens, where each position's u may still lie).
# There are two tokens, so that one u decides a draw.

SIZE = 5  # tokens


class PositionalChain:
    """Chains of three through `sampling.propose`: token 0 is drawn where u is below its probability."""

    depth = 3

    def __init__(self, q):
        self.q = q

    def cuts(self, committed, numbers, level):
        drafted = self.draft(committed, numbers, level).value[0, 1:].tolist() if level else []
        return [float(self.q((*committed, *drafted))[0])]

    def draft(self, committed, numbers, depth):
        window = torch.tensor(numbers, dtype=torch.float64)[None, :, None]
        state = SimpleNamespace(noise=Uniform.of(window), request=SimpleNamespace(sampling=Sampling(temperature=1.0)))
        pending, tokens, distributions = torch.tensor([committed[-1]]), [], []
        for level in range(depth):
            logits = self.q((*committed, *(int(t) for t in tokens))).log()[None]
            token, distribution = sampling.propose(logits, state, level)
            tokens.append(token)
            distributions.append(distribution)
        return trees.chain_draft(pending, torch.stack(tokens, 1), Categorical.chain(distributions))


def process_law(drafter, p, shift=lambda gained: gained, verdicts=verdicts):
    """Joint law of SIZE tokens. shift: by how far numbers move after so many tokens. verdicts: what the rule can do."""
    distribution, branches = torch.zeros((2,) * SIZE, dtype=torch.float64), {}
    fresh = ((0.0, 1.0),) * drafter.depth
    for y in range(2):
        branches[(y,), fresh] = float(p(())[y])
    while branches:
        new = {}
        for (committed, spans), weight in branches.items():
            if len(committed) == SIZE:
                distribution[committed] += weight
                continue
            depth = min(drafter.depth, SIZE - len(committed) - 1)
            for parts, likely in narrowed(drafter, committed, spans, depth):
                numbers = [(a + b) / 2 for a, b in parts]
                none = trees.empty_draft(torch.tensor(committed[-1:]))
                draft = drafter.draft(committed, numbers, depth) if depth else none
                for gained, share in verdicts(p, committed, draft):
                    after = ((*parts, *fresh)[shift(len(gained)) :])[: drafter.depth]
                    key = ((*committed, *gained), after if len(committed) + len(gained) < SIZE else None)
                    new[key] = new.get(key, 0.0) + weight * likely * share
        branches = new
    return distribution


def narrowed(drafter, committed, spans, depth, level=0):
    """Where the numbers lie, so far as the draft depends on them, with the probability of each case."""
    if level == depth:
        yield tuple(spans), 1.0
        return
    numbers = [(a + b) / 2 for a, b in spans]
    for parts, likely in split(spans, {level: drafter.cuts(committed, numbers, level)}):
        for further, share in narrowed(drafter, committed, parts, depth, level + 1):
            yield further, likely * share
