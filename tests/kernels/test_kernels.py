"""Every other operator against its definition on the CPU, and the bad input it refuses."""

import pytest
import torch

from tests.kernels import cases
from visspec import kernels, sampling
from visspec.kernels import attention, commit, groups, neighbours, warp
from visspec.types import Sampling

SEEDS = range(10)


def each(kinds):
    return pytest.mark.parametrize("case", kinds, ids=str)


@each(cases.NEIGHBOURS)
def test_neighbour_mass(case):
    for seed in SEEDS:
        arguments = cases.neighbours(seed, **case)
        result = kernels.neighbour_mass(**arguments)
        assert torch.allclose(result.double(), neighbours.reference(**arguments), atol=1e-6)


def test_neighbour_outside_vocabulary():
    for seed in SEEDS:
        arguments = cases.neighbours(seed, lam=4.0)
        arguments["neighbours"][:, ::2] = torch.tensor([-1, 23, 99, -(2**40), 2**40])
        result = kernels.neighbour_mass(**arguments)
        assert torch.allclose(result.double(), neighbours.reference(**arguments), atol=1e-6)


@pytest.mark.parametrize("rule", [{"delta": 0.1}, {"lam": 1.1}])
def test_neighbour_bounds_are_fp32_numbers(rule):
    p = torch.tensor([[1.0, 0.1, 0.3, 0.6]])
    arguments = {"p": p, "token": torch.tensor([0]), "neighbours": torch.ones(4, 1, dtype=torch.long), **rule}
    mass = kernels.neighbour_mass(**arguments)
    assert mass.double().tolist() == neighbours.reference(**arguments).tolist()
    assert ("lam" in rule) or mass.tolist() == p[0, 1:2].tolist()


@each(cases.GROUPS)
def test_grouped_mass(case):
    for seed in SEEDS:
        arguments = cases.groups(seed, **case)
        result = torch.stack(kernels.grouped_mass(**arguments), 1)
        assert torch.allclose(result.double(), groups.reference(**arguments), atol=1e-6)


def check_commit(arguments):
    expected = commit.reference(**arguments)
    kernels.commit_kv(**arguments)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(arguments["kv"], expected))


@each(cases.COMMIT)
def test_commit_kv(case):
    for seed in SEEDS:
        check_commit(cases.commit(seed, **case))


def test_commit_kv_at_end_and_strided():
    arguments = cases.commit(0, slots=8, rows=2)
    arguments["length"][:] = torch.tensor([8, 0])  # the first row is full and keeps nothing
    arguments["kv"] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in arguments["kv"]]
    check_commit(arguments)


def test_commit_kv_within_path():
    arguments = cases.commit(0)
    arguments["path"], arguments["count"] = torch.tensor([[0, 2, 5]] * 3), torch.tensor([3, 4, 99])
    check_commit(arguments)


def test_mask_of_tree():
    parent = torch.tensor([[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 0, 3, 3, 3], [-1, 0, -1, 1, 3, 4, 5]])
    above = [[{n} for n in range(7)] for _ in range(3)]
    for b, row in enumerate(parent.tolist()):
        for n, p in enumerate(row):
            above[b][n] |= above[b][p] if p >= 0 else set()
    mask = kernels.ancestors(parent)
    assert [[set(row.nonzero()[:, 0].tolist()) for row in tree] for tree in mask] == above
    assert torch.equal(kernels.ancestors(parent[:2], 3), mask[:2]) and torch.equal(kernels.ancestors(parent, 9), mask)


@each(cases.ATTENTION)
def test_tree_attention(case):
    for seed in range(3):
        arguments = cases.attention(seed, **case)
        ancestors = kernels.ancestors(arguments["parent"])
        result = kernels.tree_attention(**arguments)
        parent = arguments.pop("parent")
        expected = attention.reference(**arguments, ancestors=ancestors)
        assert torch.allclose(result, expected, atol=1e-5 if expected.dtype == torch.float32 else 2e-2)
        if (parent == parent[0]).all():
            assert torch.equal(result, kernels.tree_attention(**arguments, parent=parent[0]))


def test_guided_warp_layouts():
    z = torch.randn(7, 3).t()
    for scores in (False, True):
        found = kernels.guided_warp(z, top_k=3, scores=scores)
        assert found.is_contiguous() and torch.equal(found, kernels.guided_warp(z.contiguous(), top_k=3, scores=scores))


@each(cases.WARP)
def test_guided_warp(case):
    for seed in SEEDS:
        arguments = cases.warp(seed, **case)
        for scores in (False, True):
            result = kernels.guided_warp(**arguments, scores=scores)
            assert torch.allclose(result, warp.reference(**arguments, scores=scores), atol=1e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_guided_warp_against_transformers(ties):
    warpers = pytest.importorskip("transformers")
    z = cases.warp(0, rows=40, vocabulary=200, ties=ties)["logits"]
    expected = warpers.TemperatureLogitsWarper(0.8)(None, z)
    expected = warpers.TopPLogitsWarper(0.7)(None, warpers.TopKLogitsWarper(20)(None, expected)).softmax(-1)
    result = kernels.guided_warp(z, temperature=0.8, top_k=20, top_p=0.7)
    if ties:  # which of several equal tokens falls off the edge is up to its unstable sort
        result, expected = result.sort().values, expected.sort().values
    assert torch.allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("V", [2, 3, 7, 10, 12, 49, 100])
def test_guided_warp_uniform_law(V):
    warpers = pytest.importorskip("transformers")
    z = torch.zeros(1, V)
    for top_p in (i / 20 for i in range(1, 20)):
        kept = int((kernels.guided_warp(z, top_p=top_p) > 0).sum())
        assert kept == int((warp.reference(z, top_p=top_p) > 0).sum())
        assert kept == int((sampling.warp(z, Sampling(temperature=1.0, top_p=top_p)) > float("-inf")).sum())
        assert kept == int((warpers.TopPLogitsWarper(top_p)(None, z) > float("-inf")).sum())


LAW = torch.full((2, 5), 0.2)
IDS = torch.tensor([1, 2])
TABLE = torch.tensor([[1, 2]] * 5)
KV = torch.zeros(2, 1, 8, 4)


@pytest.mark.parametrize(("call", "error", "named"), [
    (lambda: kernels.guided_warp(torch.zeros(2, 5, dtype=torch.int64)), TypeError, "logits"),
    (lambda: kernels.guided_warp(LAW, LAW[:1]), ValueError, "uncond"),
    (lambda: kernels.guided_warp(LAW, temperature=float("nan")), ValueError, "temperature"),
    (lambda: kernels.guided_warp(LAW, LAW, guidance=-1.0), ValueError, "guidance: found -1"),
    (lambda: kernels.guided_warp(LAW, top_p=1.5), ValueError, "top_p"),
    (lambda: kernels.neighbour_mass(LAW, IDS, TABLE), ValueError, "delta"),
    (lambda: kernels.neighbour_mass(LAW, IDS - 2, TABLE, delta=0.1), ValueError, "token: found ids from -1"),
    (lambda: kernels.neighbour_mass(LAW, IDS, TABLE, delta=0.1, row=IDS), ValueError, "row: found ids from 1 to 2"),
    (lambda: kernels.neighbour_mass(LAW, IDS, TABLE[:4], delta=0.1), ValueError, "neighbours"),
    (lambda: kernels.grouped_mass(LAW, None, IDS * 9, group=2), ValueError, "token"),
    (lambda: kernels.grouped_mass(LAW, None, IDS, group=-1), ValueError, "group"),
    (lambda: kernels.commit_kv([KV, KV[:, :, :4]], IDS, TABLE[:2], IDS), ValueError, "kv"),
    (lambda: kernels.ancestors(IDS[None], -1), ValueError, "levels"),
    (lambda: kernels.tree_attention(KV, KV, KV, IDS), ValueError, "parent"),
    (lambda: kernels.tree_attention(KV, KV.double(), KV, IDS), TypeError, "k:"),
    (lambda: kernels.tree_attention(KV[:, :, :0], KV, KV, IDS), ValueError, "q: found an empty tree"),
])  # fmt: skip
def test_bad_input_names_the_argument(call, error, named):
    with pytest.raises(error, match=f"^{named}"):
        call()
