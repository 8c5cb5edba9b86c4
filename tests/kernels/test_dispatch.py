"""What a verification dispatches: at most sixty ATen calls and no wait for the device; the operators' contracts."""

from functools import partial
from importlib import import_module

import pytest
import torch

from tests.doubles import drafted
from tests.kernels import cases
from tests.replays import Waits
from visspec import kernels, sampling
from visspec import tree as trees
from visspec.accept.cool import Cool
from visspec.accept.exact import Exact
from visspec.accept.grouped import Grouped
from visspec.accept.lantern import Lantern, LanternPlus
from visspec.accept.rejection import Rejection
from visspec.accept.typical import Typical
from visspec.distributions import Categorical
from visspec.kernels import accept, attention, commit, growth, warp
from visspec.kernels import neighbours as nearest
from visspec.types import Capabilities, Sampling, Scores


def tree_arguments(case, depth, branch):
    rule = {name: case.get(name) for name in ("mass", "neighbours", "delta", "lam")}
    return {**case, **rule, "depth": depth, "branch": branch}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", cases.ACCEPT_KINDS, ids=str)
def test_dispatches_from_logits(kind, rows, dtype):
    """Guidance, warp and acceptance of 59 nodes, counted inside the operators. (numpy on a CPU is not counted.)"""
    arguments = tree_arguments(cases.accept(0, rows=rows, nodes=59, vocabulary=300, dtype=dtype, **kind), 5, 10)
    cond, uncond = torch.randn(2, rows * 59, 300)
    with Waits() as count:
        p = warp.guided_warp_torch(cond, uncond, 7.5, 0.9, 100, 0.9, True).softmax(-1)
        before = count.calls
        accept.accept_tree_host(**{**arguments, "p": p.view(rows, 59, 300)})
    assert count.calls <= 60 and count.calls - before <= 20 and not count.found


V, DRAWS = 320, Sampling(temperature=0.9, top_k=100, top_p=0.9, guidance=3.0)
SHAPE = (-1, *[0] * 10, *(1 + n // 5 for n in range(20)), *(11 + n // 2 for n in range(16)), *range(31, 43))
RULES = {  # each with the most that it dispatches, guidance and warp (5) included, where the tree is of `static`
    "exact": (Exact, 33),
    "rejection": (Rejection, 17),
    "typical": (partial(Typical, epsilon=1e-3), 32),
    "lantern": (partial(Lantern, k=20, delta=0.3), 17),
    "lantern_plus": (partial(LanternPlus, k=20, lam=9.0), 17),
    "grouped": (partial(Grouped, group=41), 37),
    "cool": (partial(Cool, omega=2.0), 26),
}


def round_of(seed, drawn, shared, rows=1):
    """Raw logits of both guidance rows for 59 nodes, the laws after them, and a draft from laws near those."""
    g = torch.Generator().manual_seed(seed)
    tree = trees.static(SHAPE)
    above = tree.parent[0].clamp(min=0)
    if not shared:
        tree = trees.from_parents(tree.parent.expand(rows, -1).clone(), tree.levels)
    cond, uncond = 0.4 * (torch.randn(2, rows, 59, V, generator=g) + torch.randn(59, V, generator=g))
    p = sampling.warp(cond, DRAWS, uncond).softmax(-1)
    q = (p[:, above] + 1e-3).sqrt()
    q /= q.sum(-1, keepdim=True)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(rows, 59)
    return cond, uncond, p, drafted(tokens, tree, q if drawn else None)


@pytest.mark.parametrize("kind", ["static", "grown", "drawn"])
@pytest.mark.parametrize("name", list(RULES))
def test_dispatches_of_rule(name, kind):
    """As the engine calls it, where an operator of ours counts once. Drafts with laws come on static trees."""
    make, most = RULES[name]
    if name == "exact" and kind == "drawn":
        pytest.skip("takes no laws of drafts")
    rule, drift = make(), 0.0
    if name != "exact":
        rule.bind(Capabilities(vocab=V, codebook=torch.randn(V, 4, generator=torch.Generator().manual_seed(0))))
    for seed in range(6):
        cond, uncond, _, draft = round_of(seed, kind == "drawn", kind != "grown")
        noise = rule.make_noise([torch.Generator().manual_seed(seed)], V)
        for _ in range(2):  # what is kept of a shape is worked out in the first round
            with Waits() as count:
                verdict = rule(draft, Scores(Categorical(sampling.warp(cond, DRAWS, uncond))), noise)
        assert count.calls <= (60 if kind == "grown" else most) and not count.found
        drift += 0.0 if verdict.drift is None else float(verdict.drift)
    assert drift > 0 or rule.traits.guarantee == "exact"


def test_no_other_step_waits_for_the_device():
    case = cases.accept(0, drawn=True, relaxed=True, chain=True)
    near = cases.neighbours(0, lam=2.0)
    with Waits() as count:
        kernels.accept_tree(**case, branch=1)
        nearest.neighbour_mass_torch(**near, row=None)
        warp.guided_warp_torch(torch.randn(2, 30), torch.randn(2, 30), 3.0, 0.7, 9, 0.9, False)
    assert not count.found


@pytest.mark.parametrize("kind", cases.ACCEPT_KINDS, ids=str)
def test_opcheck(kind):
    arguments = tree_arguments(cases.accept(0, rows=2, nodes=4, **kind), 3, 3)
    torch.library.opcheck(torch.ops.visspec.accept_tree, tuple(arguments[k] for k in NAMES))


NAMES = "tokens parent p q uniforms draw mass neighbours delta lam depth branch".split()


def test_launch_device(monkeypatch):
    """Triton launches on the current device: each CUDA body must first make that of its first tensor current."""

    class Entered(Exception):
        pass

    def device_of(tensor):
        raise Entered(tensor.device)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    away = torch.empty(2, 3, device="meta")
    launched = 0
    for name in kernels.FILES:
        file = import_module(f"visspec.kernels.{name}")
        for op in (thing for thing in vars(file).values() if isinstance(thing, torch.library.CustomOpDef)):
            if "cuda" in op._backend_fns:
                with pytest.raises(Entered, match="meta"):
                    op._backend_fns["cuda"]([away] if op is commit._commit_kv_op else away)
                launched += 1
    with pytest.raises(Entered, match="meta"):
        accept.accept_tree_device(away)
    assert launched == 6


class Launches:
    """Stands for a kernel: what Triton would compile it for at each launch, sizes of blocks aside."""

    def __init__(self, kernel):
        triton = pytest.importorskip("triton")
        backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
        bind = import_module("triton.runtime.jit").create_function_from_signature
        self.binder, self.seen = bind(kernel.signature, kernel.params, backend), set()

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.add(
            tuple(kind for kind in self.binder(*args, **options)[1] if kind[0] != "constexpr")
        )


LAUNCHES = {  # the kernels of a draft's round, for nodes of a draft and shares of the slots
    "_tree_attention_kernel _merge_kernel": (
        attention,
        lambda nodes, parts: attention.tree_attention_triton(
            *(torch.zeros(1, 4, n, 64) for n in (nodes, 256, 256)),
            torch.tensor([9]).int(), torch.ones(1, nodes, nodes).bool(), torch.zeros(1).int(), None, splits=parts,
        ),
    ),
    "_accept_tree_kernel": (
        accept,
        lambda nodes, parts: accept.accept_tree_triton(
            *cases.accept(0, rows=1, nodes=nodes, vocabulary=64).values(), *[None] * 4, nodes - 1, parts
        ),
    ),
    "_ancestors_kernel": (
        growth, lambda nodes, parts: growth.ancestors_triton(torch.zeros(1, nodes).long(), parts),
    ),
    "_commit_kernel": (
        commit,
        lambda nodes, parts: commit.commit_kv_triton(
            [torch.zeros(1, 2, 64, 16)], torch.ones(1).long(), torch.zeros(1, nodes).long(), torch.ones(1).long()
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("names", LAUNCHES)
def test_one_compilation_for_any_size(names, monkeypatch):
    """Or a generation waits for Triton, for a second or two, at its first draft of 1, of 16, of 17 nodes."""
    file, launch = LAUNCHES[names]
    stands = {name: Launches(getattr(file, name)) for name in names.split()}
    for name, stand in stands.items():
        monkeypatch.setattr(file, name, stand)
    for nodes, parts in ((1, 1), (2, 16), (5, 2), (8, 3), (9, 32), (16, 4), (17, 1), (32, 16)):
        launch(nodes, parts)
    assert {name: len(stand.seen) for name, stand in stands.items()} == dict.fromkeys(stands, 1)


def test_opcheck_of_the_other_operators():
    ops = torch.ops.visspec
    near = cases.neighbours(0, delta=0.1)
    group = cases.groups(0)
    tree = cases.attention(0)
    moves = cases.commit(0)
    ancestors = growth.ancestors(tree["parent"])
    calls = [
        (ops.neighbour_mass, (near["p"], near["token"], near["neighbours"], 0.1, None, None)),
        (ops.guided_warp, (torch.randn(2, 9), torch.randn(2, 9), 2.0, 0.5, 3, 0.9, False)),
        (ops.grouped_mass, tuple(group.values())),
        (ops.commit_kv, tuple(moves.values())),
        (ops.ancestors, (tree["parent"], 4)),
        (ops.tree_attention, (tree["q"], tree["k"], tree["v"], tree["length"], ancestors, None, None)),
    ]
    for op, arguments in calls:
        utils = "test_schema", "test_faketensor", "test_autograd_registration"
        torch.library.opcheck(op, arguments, test_utils=utils)
