"""Acceptance: the vectorised operators against the definition, and what they refuse."""

import pytest
import torch

from tests.kernels import cases
from visspec.kernels import accept, accept_tree

TABLE = torch.zeros(11, 3, dtype=torch.long)


def row(case, b):
    batched = ("tokens", "parent", "p", "q", "uniforms", "draw", "mass")
    return {k: v[b] if k in batched and v is not None else v for k, v in case.items()}


def assert_row(outputs, b, wanted):
    path, length, following, drift = (out[b] for out in outputs)
    kept = path[path >= 0].tolist()
    assert (kept, int(following), int(length)) == (wanted[0], wanted[1], len(wanted[0]))
    assert abs(float(drift) - wanted[2]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tree_against_definition(dtype):
    seen = 0
    for seed in range(200):
        sizes = {"rows": 50, "nodes": 2 + seed % 8, "vocabulary": 3 + seed % 13}
        case = cases.accept(seed, dtype=dtype, **sizes, **cases.ACCEPT_KINDS[seed % len(cases.ACCEPT_KINDS)])
        outputs = accept_tree(**case)
        for b in range(50):
            assert_row(outputs, b, accept.reference(**row(case, b)))
        seen += 50
    assert seen == 10_000


@pytest.mark.parametrize("case", [{"nodes": 1, "vocabulary": 5, "chain": True}, *cases.ACCEPT], ids=str)
def test_definition_for_every_shape(case):
    chain = case.get("chain", False)
    for seed in range(40 if chain else 6):
        arguments = cases.accept(seed, **case | ({"rows": 20} if chain else {}))
        for outputs in (accept_tree(**arguments), *([accept_tree(**arguments, branch=1)] if chain else [])):
            for b in range(len(arguments["tokens"])):
                assert_row(outputs, b, accept.reference(**row(arguments, b)))


@pytest.mark.parametrize("kind", cases.ACCEPT_KINDS, ids=str)
def test_depth_and_branch_limits(kind):
    """For every limit the call equals one in which the nodes beyond it are padding, and the definition."""
    for seed, (depth, branch) in enumerate([(0, 9), (1, 9), (2, 9), (9, 0), (9, 1), (9, 2), (2, 1), (1, 2)]):
        case = cases.accept(seed, rows=20, nodes=9, vocabulary=5, **kind)
        case["uniforms"] *= 0.5  # long paths
        result = accept_tree(**case, depth=depth, branch=branch)
        assert result[0].shape == (20, min(depth + 1, 9)) and int(result[1].max()) <= depth + 1
        kept = case["parent"].clone()
        for b, above in enumerate(case["parent"].tolist()):
            level = [0] * 9
            for n in range(1, 9):
                level[n] = level[above[n]] + 1 if above[n] >= 0 else 0
                if level[n] > depth or above[:n].count(above[n]) >= branch:
                    kept[b, n] = -1
        padded = accept_tree(**{**case, "parent": kept})
        assert all(torch.equal(a, b) for a, b in zip(result[1:], padded[1:]))
        for b in range(20):
            assert_row(result, b, accept.reference(**row(case, b), depth=depth, branch=branch))


def test_fp32_bounds():
    """0.1 in fp32 is more than 0.1: a neighbour of that mass is within delta = 0.1 of the operator."""
    p = torch.tensor([[[0.0, 0.1, 0.3, 0.6]] * 2])
    case = {"tokens": torch.tensor([[0, 0]]), "parent": torch.tensor([[-1, 0]]), "p": p, "q": None}
    case.update(uniforms=torch.full((1, 2), 0.05), draw=torch.zeros(1), neighbours=torch.ones(4, 1).long(), delta=0.1)
    outputs = accept_tree(**case)
    assert outputs[1].tolist() == [2]
    assert_row(outputs, 0, accept.reference(**row(case, 0)))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("drawn", [False, True])
def test_neighbour_outside_vocabulary(drawn, kind):
    ends = torch.iinfo(kind)
    for seed in range(10):
        case = cases.accept(seed, rows=10, drawn=drawn, near="lam")
        case["neighbours"] = case["neighbours"].to(kind)
        case["neighbours"][:, ::2] = torch.tensor([-1, 11, ends.min if seed % 2 else ends.max], dtype=kind)
        outputs = accept_tree(**case)
        for b in range(10):
            assert_row(outputs, b, accept.reference(**row(case, b)))


@pytest.mark.parametrize("kind", cases.ACCEPT_KINDS, ids=str)
def test_log_laws_decide_as_their_softmax(kind):
    """Only the laws of nodes that are reached are worked out: the others may hold anything."""
    for seed in range(10):
        case = cases.accept(seed, rows=20, nodes=9, **kind)
        scores = 3.0 * torch.randn(case["p"].shape, generator=torch.Generator().manual_seed(seed))
        expected = accept_tree(**{**case, "p": scores.softmax(-1)})
        result = accept_tree(**{**case, "p": scores}, scores=True)
        assert all(torch.equal(a, b) for a, b in zip(result, expected))
        unseen = torch.ones(case["tokens"].shape, dtype=torch.bool)
        unseen.scatter_(1, expected[0].clamp(min=0), False)
        poisoned = scores.masked_fill(unseen[..., None], float("nan"))
        assert all(torch.equal(a, b) for a, b in zip(accept_tree(**{**case, "p": poisoned}, scores=True), expected))


@pytest.mark.parametrize(("change", "error", "named"), [
    ({"tokens": torch.zeros(4, 7)}, TypeError, "tokens"), ({"tokens": torch.full((4, 7), 99)}, ValueError, "tokens"),
    ({"tokens": torch.full((4, 7), -1)}, ValueError, "tokens: found ids from -1"),
    ({"parent": torch.zeros(4, 6, dtype=torch.long)}, ValueError, "parent"),
    ({"p": torch.zeros(4, 0, 11)}, ValueError, "p: found an empty tree"),
    ({"q": torch.zeros(4, 7, 10)}, ValueError, "q:"), ({"uniforms": None}, TypeError, "uniforms"),
    ({"mass": torch.zeros(4, 3)}, ValueError, "mass"),
    ({"neighbours": torch.zeros(11, 3, dtype=torch.long)}, ValueError, "delta"),
    ({"neighbours": TABLE, "delta": float("nan")}, ValueError, "delta: found nan"),
    ({"neighbours": TABLE, "lam": 0.5}, ValueError, "lam"), ({"depth": -1}, ValueError, "depth: found -1"),
], ids=str)  # fmt: skip
def test_bad_input_names_the_argument(change, error, named):
    with pytest.raises(error, match=f"^{named}"):
        accept_tree(**{**cases.accept(0), **change})


def test_invalid_laws():
    case = cases.accept(0, rows=3, nodes=4, vocabulary=5)
    for value in (0.0, float("nan"), float("inf"), 2.0):
        case["p"] = torch.full_like(case["p"], value)
        path, length, following, _ = accept_tree(**case)
        assert ((following >= 0) & (following < 5)).all() and (path < 4).all() and (length <= 4).all()


@pytest.mark.parametrize("parent_rows", [1, 2])
def test_strided_laws_and_shared_parents(parent_rows):
    case = cases.accept(4, rows=2, nodes=5, vocabulary=6)
    case["parent"] = torch.tensor([-1, 0, 0, 1, 1])
    expected = accept_tree(**case)
    case["p"] = case["p"].transpose(1, 2).contiguous().transpose(1, 2)
    case["parent"] = case["parent"].expand(parent_rows, 5)
    assert all(torch.equal(a, b) for a, b in zip(expected, accept_tree(**case)))


def test_coins_are_strict():
    p = torch.tensor([[[1.0, 0.0, 0.0]] * 3])
    almost_one = torch.full((1, 3), 1 - 2.0**-24)
    uniforms = almost_one * torch.tensor([1, 0, 1])
    tokens, parent = torch.tensor([[0, 1, 0]]), torch.tensor([-1, 0, 0])
    path, length, following, _ = accept_tree(tokens, parent, p, None, uniforms, almost_one[0, :1])
    assert path.tolist() == [[0, 2, -1]] and length.tolist() == [2] and following.tolist() == [0]
