"""Triton kernels against the references: same uniforms in, same decisions out, on outputs poisoned with NaN."""

import pytest
import torch

from tests.kernels import cases
from visspec.kernels import accept, attention, commit, groups, growth, neighbours, warp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = range(2)
MOST_ROWS = 4 if DEVICE == "cpu" else 20  # each is a program, which the interpreter takes long for
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked lanes too


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Unwritten outputs show: fresh memory is NaN or an impossible id."""
    plain = torch.empty

    def poisoned(*args, **kwargs):
        out = plain(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


def to_device(case):
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in case.items()}


def ids(cases):
    return [",".join(f"{k}={v}".replace("torch.", "") for k, v in case.items()) or "default" for case in cases]


def tree_arguments(case):
    case = {"mass": None, "neighbours": None, "delta": None, "lam": None, **case}
    names = ("tokens", "parent", "p", "q", "uniforms", "draw", "mass", "neighbours", "delta", "lam")
    depth = case["tokens"].shape[1] - 1
    return [case[name] for name in names] + [depth, depth]


def assert_same_decisions(found, wanted):
    for ours, theirs in zip(found[:3], wanted[:3]):
        assert torch.equal(ours.cpu(), theirs.cpu())
    assert torch.allclose(found[3].cpu(), wanted[3].cpu(), atol=1e-5)


@pytest.mark.parametrize("case", cases.ACCEPT, ids=ids(cases.ACCEPT))
def test_accept_tree(case):
    case = {**case, "rows": min(case.get("rows", 4), MOST_ROWS)}
    for seed in SEEDS:
        arguments = cases.accept(seed, **case)
        result = accept.accept_tree_triton(*tree_arguments(to_device(arguments)))
        assert_same_decisions(result, accept.accept_tree_host(*tree_arguments(arguments)))


@pytest.mark.parametrize("drawn", [False, True], ids=["point", "drawn"])
@pytest.mark.parametrize("kind", [{"relaxed": True}, {"near": "delta"}, {"near": "lam"}], ids=str)
def test_accept_tree_from_log_distributions(kind, drawn):
    g, drift = torch.Generator().manual_seed(0), 0
    for seed in SEEDS:
        case = cases.accept(seed, rows=6, nodes=8, vocabulary=23, drawn=drawn, **kind)
        case["uniforms"] *= 0.5  # long paths
        case["p"] = torch.randn(case["p"].shape, generator=g) * 2.0
        result = accept.accept_tree_device(*tree_arguments(to_device(case)), True)
        expected = accept.accept_tree_host(*tree_arguments(case), True)
        assert_same_decisions(result, expected)
        drift += int((expected[3] > 1e-2).sum())
    assert drift > 3


@pytest.mark.parametrize("kind", [{}, {"drawn": True}, {"near": "delta"}], ids=str)
def test_depth_and_branch_limits(kind):
    for seed, limits in enumerate([(0, 9), (1, 9), (2, 2), (9, 1)]):
        arguments = cases.accept(seed, rows=6, vocabulary=5, **kind)
        arguments["uniforms"] *= 0.5  # long paths
        result = accept.accept_tree_triton(*tree_arguments(to_device(arguments))[:-2], *limits)
        assert_same_decisions(result, accept.accept_tree_host(*tree_arguments(arguments)[:-2], *limits))


def test_mass_of_ids_out_of_range():
    far = 2**40  # a load from there would not go unnoticed
    near = cases.neighbours(0, lam=4.0)
    near["neighbours"][:, ::2] = torch.tensor([-1, 23, far, -far, 99])
    result = neighbours.neighbour_mass_triton(**to_device(near), row=None).cpu()
    assert torch.allclose(result.double(), neighbours.reference(**near), atol=1e-6) and (result > 0).any()
    bad = torch.tensor([0, far, -far, 23, -1], device=DEVICE)
    assert neighbours.neighbour_mass_triton(**to_device({**near, "token": bad}), row=None)[1:].tolist() == [0.0] * 4
    assert neighbours.neighbour_mass_triton(**to_device(near), row=bad)[1:].tolist() == [0.0] * 4
    case = {**cases.groups(0, rows=5, vocabulary=23), "token": bad}
    masses = groups.grouped_mass_triton(**to_device(case))
    assert all(mass[0] > 0 and mass[1:].tolist() == [0.0] * 4 for mass in masses)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accept_tree_ten_thousand_cases(dtype):
    for seed in range(40):
        kind = ({}, {"drawn": True}, {"relaxed": True}, {"near": "lam"})[seed % 4]
        arguments = cases.accept(seed, rows=250, nodes=12, vocabulary=50, dtype=dtype, **kind)
        result = accept.accept_tree_triton(*tree_arguments(to_device(arguments)))
        assert_same_decisions(result, accept.accept_tree_host(*tree_arguments(arguments)))


def test_out_of_range_token_rejected():
    arguments = to_device(cases.accept(0, rows=2, nodes=3, vocabulary=5))
    arguments["tokens"][:, 1:] = torch.tensor([7, -3], device=DEVICE)
    arguments["parent"] = torch.tensor([-1, 0, 0], device=DEVICE)
    arguments["uniforms"].zero_()
    path, length, following, *_ = accept.accept_tree_triton(*tree_arguments(arguments))
    assert length.tolist() == [1, 1] and path[:, 1:].eq(-1).all() and ((following >= 0) & (following < 5)).all()


@pytest.mark.parametrize("case", cases.NEIGHBOURS, ids=ids(cases.NEIGHBOURS))
def test_neighbour_mass(case):
    arguments = cases.neighbours(0, **case)
    result = neighbours.neighbour_mass_triton(**to_device({"row": None, **arguments}))
    assert torch.allclose(result.cpu().double(), neighbours.reference(**arguments), atol=1e-6)


@pytest.mark.parametrize("case", cases.GROUPS, ids=ids(cases.GROUPS))
def test_grouped_mass(case):
    arguments = cases.groups(0, **case)
    result = torch.stack(groups.grouped_mass_triton(**to_device(arguments)), 1)
    assert torch.allclose(result.cpu().double(), groups.reference(**arguments), atol=1e-6)


def check_commit(arguments):
    expected = commit.reference(**arguments)
    kv = [t.to(DEVICE) for t in arguments.pop("kv")]
    commit.commit_kv_triton(kv, **to_device(arguments))
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(kv, expected))


@pytest.mark.parametrize("case", cases.COMMIT, ids=ids(cases.COMMIT))
def test_commit_kv(case):
    for seed in SEEDS:
        check_commit(cases.commit(seed, **case))


@pytest.mark.parametrize("count", [3, 99])
@pytest.mark.parametrize("nodes", [3, 40])
def test_commit_kv_stays_within_the_path(nodes, count):
    """A count beyond the columns of the path, and more columns than a block."""
    arguments = cases.commit(0, nodes=nodes + 2, slots=60)
    arguments["path"] = torch.tensor([[0, *range(2, nodes + 1)]] * 3)
    arguments["count"] = torch.tensor([count] * 3)
    check_commit(arguments)


@pytest.mark.parametrize("nodes", [1, 2, 9, 17])
def test_ancestors(nodes):
    parent = cases.attention(nodes, rows=3, nodes=nodes)["parent"]
    parent[2, nodes // 2 :] = -1
    result = growth.ancestors_triton(parent.to(DEVICE), nodes - 1)
    assert result.dtype == torch.bool and torch.equal(result.cpu(), growth.ancestors_host(parent, nodes - 1))
    wild = torch.tensor([[-1, 1, 99, -7]], device=DEVICE)  # no sound tree: an answer all the same
    assert growth.ancestors_triton(wild, 3)[0].cpu().tolist() == torch.eye(4, dtype=torch.bool).tolist()


@pytest.mark.parametrize("case", cases.ATTENTION, ids=ids(cases.ATTENTION))
def test_tree_attention(case, splits=2):
    arguments = to_device({"start": None, "scaling": None, **cases.attention(0, **case)})
    arguments["ancestors"] = growth.ancestors(arguments.pop("parent"))
    expected = attention.reference(**arguments)
    # 16-bit outputs are rounded, and tensor cores round the weights: two units in the last place of values near one.
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    assert torch.allclose(attention.tree_attention_triton(**arguments, splits=splits), expected, atol=tolerance)


def test_tree_attention_views():
    """As draft passes hand them over: columns of a table, and corners of a larger one."""
    arguments = to_device(cases.attention(1, rows=3, nodes=5, padded=True))
    own = growth.ancestors(arguments.pop("parent"))
    table = torch.stack([arguments.pop("length"), arguments.pop("start"), torch.full((3,), 99, device=DEVICE)], dim=1)
    wide = torch.ones(3, 7, 9, dtype=torch.bool, device=DEVICE)
    wide[:, 1:6, 2:7] = own
    given = {"length": table[:, 0], "start": table[:, 1], "scaling": None}
    expected = attention.reference(**arguments, **given, ancestors=own)
    for seen in (wide[:, 1:6, 2:7], own.transpose(1, 2).contiguous().transpose(1, 2)):
        result = attention.tree_attention_triton(**arguments, **given, ancestors=seen)
        assert torch.allclose(result, expected, atol=1e-5)
    given["ancestors"] = own[:1].expand(3, -1, -1)
    one, expected = (call(**arguments, **given) for call in (attention.tree_attention_triton, attention.reference))
    assert torch.allclose(one, expected, atol=1e-5)


WARPS = [(case, False, scores) for case in cases.WARP for scores in (False, True)]
WARPS += [(case, True, scores) for n, case in enumerate(cases.WARP) for scores in (False, True)
          if "top_p" not in case or scores == (n % 2 == 0)]  # in turn where a call takes a second  # fmt: skip


@pytest.mark.parametrize(("case", "blocks", "scores"), WARPS)
def test_guided_warp(case, blocks, scores, monkeypatch):
    if blocks:
        monkeypatch.setattr(warp, "WHOLE", 0)
        monkeypatch.setattr(warp, "WHOLE_TOP_P", 0)
        few = next(size for size in (16, 128, 1024) if case.get("vocabulary", 0) <= 8 * size)
        monkeypatch.setattr(warp, "BLOCK", few)
        most = 2 if "top_p" not in case or "ties" in case else 1  # a row is a program, and takes a second
        case = {**case, "rows": min(case.get("rows", 2), most)}
    arguments = cases.warp(0, **case)
    full = {"guidance": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "scores": scores, **arguments}
    result = warp.guided_warp_triton(**to_device(full)).cpu()
    expected = warp.reference(**full)
    never = float("-inf") if scores else 0.0
    assert torch.equal(result > never, expected > never) and torch.allclose(result, expected, atol=1e-6)
