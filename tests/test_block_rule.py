"""Block verification: its law over many rounds by enumeration, with its own code, and controls that must fail."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributions import SIZE, context_law, output_law, plain_law, process_law, total_variation, verdicts
from tests.distributions import PositionalChain as Chain
from tests.doubles import drafted
from tests.registry_cases import janus_pair, tiny_drafter
from tests.test_block_heads import Expecting
from visspec import registry, tree
from visspec.accept import block
from visspec.accept.block import Block, RoundNoise
from visspec.distributions import Categorical, residual
from visspec.types import Scores

V, FRESH = 5, Chain.depth  # so many positions are dropped after a round: all that were read


def blocks(p, committed, draft, chances=block.chances):
    """What the rule can do with a chain: (tokens gained, probability), as `tests.distributions.verdicts`."""
    tokens = draft.value[0, 1:].tolist()
    laws = torch.stack([p((*committed, *tokens[:n])) for n in range(len(tokens) + 1)])
    keep_N, rest_NV = (x[0] for x in chances(draft, laws[None]))
    result, going = [], 1.0
    for n in reversed(range(len(tokens) + 1)):
        here = going * (float(keep_N[n]) if n else 1.0)
        rest_V = rest_NV[n] / rest_NV[n].sum()
        result += [((*tokens[:n], y), here * float(rest_V[y])) for y in range(len(rest_V))]
        going -= here
    return [v for v in result if v[1] > 0]


def law(drafter, p, shift=FRESH):
    return process_law(drafter, p, lambda gained: shift or gained, blocks)


@pytest.mark.parametrize("drafter", [Chain, Expecting], ids=["chain", "chain that a head ends"])
@pytest.mark.parametrize("seed", range(3))
def test_law_over_many_rounds(drafter, seed, unwarped):
    p = context_law(2, seed)
    distribution = law(drafter(context_law(2, seed + 7)), p)
    assert total_variation(distribution, plain_law(p, 2, SIZE)) < 1e-12


class Fixed(Chain):
    def draft(self, committed, numbers, depth):
        tokens = torch.tensor([[(len(committed) + n) % 2 for n in range(depth)]])
        return tree.chain_draft(torch.tensor(committed[-1:]), tokens)


def test_law_of_point_masses(unwarped):
    p = context_law(2, 1)
    assert total_variation(law(Fixed(context_law(2, 0)), p), plain_law(p, 2, SIZE)) < 1e-12


def with_rest(draft, p_BNV):
    """A control: the residual of token-wise rejection."""
    keep_BN, rest_BNV = block.chances(draft, p_BNV)
    if draft.q is not None:
        rest_BNV[:, :-1] = residual(p_BNV[:, :-1], draft.q.p[:, 1:])
    return keep_BN, rest_BNV


def with_luck(draft, p_BNV):
    """A control: nodes are kept a little more often than they may be."""
    keep_BN, rest_BNV = block.chances(draft, p_BNV)
    return keep_BN**0.95, rest_BNV


def chains(q, depth, vocab=3):
    """All chains that q draws behind (), each with its probability."""
    result = [((), 1.0)]
    for _ in range(depth):
        result = [((*t, y), w * float(q(t)[y])) for t, w in result for y in range(vocab)]
    for tokens, weight in result:
        laws = Categorical.chain([Categorical(p=q(tokens[:n])[None]) for n in range(depth)])
        yield tree.chain_draft(torch.tensor([0]), torch.tensor([tokens]), laws), weight


@pytest.mark.parametrize("chances", [block.chances, with_rest, with_luck])
def test_the_law_of_a_round(chances):
    p, rounds = context_law(3, 0), []
    for draft, weight in chains(context_law(3, 1), 3):
        rounds += [(weight * share, gained) for gained, share in blocks(p, (), draft, chances)]
    result = total_variation(output_law(p, rounds, 3, 4), plain_law(p, 3, 4))
    assert result < 1e-12 if chances is block.chances else result > 1e-3


def test_control_reused_numbers(unwarped):
    p = context_law(2, 0)
    assert total_variation(law(Chain(context_law(2, 7)), p, shift=0), plain_law(p, 2, SIZE)) > 1e-3


def means(p, q, depth):
    totals = [0.0, 0.0]
    for draft, weight in chains(q, depth):
        for i, rule in enumerate((blocks, verdicts)):
            totals[i] += weight * sum(len(gained) * share for gained, share in rule(p, (), draft))
    return totals


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 3), st.floats(0.1, 3.0))
def test_block_accepts_at_least_rejection(seed, depth, sharpness):
    whole, tokenwise = means(context_law(3, seed, sharpness), context_law(3, seed + 1, sharpness), depth)
    assert whole > tokenwise - 1e-12
    assert depth > 1 or math.isclose(whole, tokenwise, rel_tol=1e-12)


def test_a_block_accepts_more_than_rejection():
    whole, tokenwise = means(context_law(3, 0), context_law(3, 1), 3)
    assert whole > tokenwise + 0.02


def test_verdict_frequencies():
    """The rule itself on one draft, its numbers and all: chi-square over (length, next); the fourth node is absent."""
    rows, p, q = 40_000, context_law(V, 3), context_law(V, 4)
    tokens = (0, *(int(q((0,) * n).topk(2).indices[n % 2]) for n in range(4)))
    laws = torch.stack([p(tokens[1 : n + 1]) for n in range(5)]).float()
    drawn = torch.stack([torch.zeros(V), *(q(tokens[1 : n + 1]) for n in range(4))]).float()
    ids = torch.tensor([tokens])
    absent = torch.tensor([[*tokens[:4], -1]])
    draft = drafted(absent.expand(rows, -1), tree.chain(4), drawn.expand(rows, -1, -1))
    noise = RoundNoise.of(torch.rand(rows, 5, 34, generator=torch.Generator().manual_seed(0)))
    noise.window = lambda positions: torch.stack(noise.ahead)[:, :positions]
    verdict = Block()(draft, Scores(Categorical(laws.log().expand(rows, -1, -1))), noise)
    assert verdict.drift is None and verdict.path[0, 0] == 0
    assert torch.equal((verdict.path >= 0).sum(1), verdict.length)
    counts = torch.zeros(5, V).index_put_((verdict.length - 1, verdict.next), torch.ones(rows), accumulate=True)
    short = drafted(ids[:, :4], tree.chain(3), drawn[None, :4])
    want = torch.zeros(5, V)
    for gained, share in blocks(lambda context: laws[len(context)].double(), (), short):
        want[len(gained) - 1, gained[-1]] += share
    assert abs(float(want.sum()) - 1) < 1e-6
    seen = want.flatten() > 1e-4
    counts, want = counts.flatten()[seen].numpy(), want.flatten()[seen].double().numpy()
    assert scipy.stats.chisquare(counts, want / want.sum() * counts.sum()).pvalue > 1e-3


def test_numbers_read_once():
    noise, whole = (RoundNoise([torch.Generator().manual_seed(s) for s in (1, 2)]) for _ in range(2))
    at = 0
    for read, counts, chunks in ((5, [2, 1], 1), (1, [1, 1], 1), (16, [4, 4], 1), (17, [4, 4], 2), (2, [1, 1], 1)):
        assert torch.equal(noise.window(read), whole.window(at + read)[:, at:])
        noise.advance(counts)
        at += 16 * chunks
    assert torch.equal(noise.window(2), whole.window(at + 2)[:, at:])


@pytest.mark.parametrize("drafter", ["jacobi:window=4,redraw=maximal", "jacobi:window=4"])
def test_drafts_and_numbers_used_once(drafter):
    rule = registry.rule("block")
    assert isinstance(rule.make_noise([torch.Generator()], V), RoundNoise)
    with pytest.raises(
        ValueError, match="drafter: Jacobi draws by numbers that serve several rounds, expected others for"
    ):
        janus_pair(tiny_drafter(drafter), rule)
