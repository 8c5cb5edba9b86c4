"""What a verification dispatches: at most sixty ATen calls and no wait for the device; the operators' contracts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from visspec.kernels import accept, attention, chain, codebook, commit, groups, growth, losses, warp
from visspec.kernels import neighbours as nearest

KINDS = [
    {},
    {"relaxed": True},
    {"near": "delta"},
    {"near": "lam"},
    {"drawn": True},
    {"drawn": True, "relaxed": True},
    {"drawn": True, "near": "delta"},
    {"near": "lam", "drawn": True},
]


class Count(TorchDispatchMode):
    """Counts ATen calls, views included, and those that make the host wait on a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "_assert_async")

    def __init__(self):
        super().__init__()
        self.calls, self.waits = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        self.calls += 1
        if name in self.WAITING or by_mask:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def tree_arguments(case, depth, branch):
    blank = dict.fromkeys(("mass", "neighbours", "delta", "lam"))
    return {**blank, **case, "depth": depth, "branch": branch}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_verification_from_raw_logits_dispatches_at_most_sixty_operations(kind, rows, dtype):
    """Guidance, warp and acceptance of 59 nodes, counted in the bodies of the operators: nothing hides inside them.

    The CPU body of the acceptance works on numpy views, which a dispatch mode does not see; on a GPU it is one launch.
    """
    arguments = tree_arguments(accept.random_case(0, rows=rows, nodes=59, vocabulary=300, dtype=dtype, **kind), 5, 10)
    cond, uncond = torch.randn(2, rows * 59, 300)
    with Count() as count:
        p = warp.guided_warp_torch(cond, uncond, 7.5, 0.9, 100, 0.9)
        accept.accept_tree_host(**{**arguments, "p": p.view(rows, 59, 300)})
    assert count.calls <= 60 and not count.waits


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_verification_waits_for_the_device(kind):
    arguments = tree_arguments(accept.random_case(0, rows=3, nodes=9, dtype=torch.bfloat16, **kind), 8, 8)
    with Count() as count:
        accept.accept_tree_host(**arguments)
    assert count.calls <= 20 and not count.waits


def test_no_other_step_waits_for_the_device():
    case = chain.random_chain(0, drawn=True, relaxed=True, ragged=True)
    near = nearest.random_case(0, lam=2.0)
    with Count() as count:
        chain.accept_chain_torch(**case)
        nearest.neighbour_mass_torch(**near, row=None)
        warp.guided_warp_torch(torch.randn(2, 30), torch.randn(2, 30), 3.0, 0.7, 9, 0.9)
    assert not count.waits


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_opcheck(kind):
    arguments = tree_arguments(accept.random_case(0, rows=2, nodes=4, **kind), 3, 3)
    torch.library.opcheck(torch.ops.visspec.accept_tree, tuple(arguments[k] for k in NAMES))


NAMES = "tokens parent p q coins draw mass neighbours delta lam depth branch".split()


def test_opcheck_of_the_other_operators():
    ops = torch.ops.visspec
    case = chain.random_chain(0, rows=2, drawn=True)
    near = nearest.random_case(0, delta=0.1)
    group = groups.random_case(0)
    draft, target = losses.random_case(0).values()
    tree = attention.random_case(0)
    moves = commit.random_case(0)
    ancestors = attention.ancestor_mask(tree["parent"])
    blank = (None, 4, None, None, None)
    calls = [
        (ops.accept_chain, (*case.values(), None, None)),
        (ops.neighbour_mass, (near["p"], near["token"], near["neighbours"], 0.1, None, None)),
        (ops.guided_warp, (torch.randn(2, 9), torch.randn(2, 9), 2.0, 0.5, 3, 0.9)),
        (ops.grouped_mass, (group["p"], group["q"], group["token"], *blank)),
        (ops.codebook_neighbours, (codebook.random_case(0)["codebook"], 3, True, 16)),
        (ops.commit_kv, tuple(moves.values())),
        (ops.draft_topk, tuple(growth.random_case(0).values())),
        (ops.extend_ancestors, (ancestors.clone(), torch.zeros(2, 2, dtype=torch.long), 3)),
        (ops.tree_attention, (tree["q"], tree["k"], tree["v"], tree["length"], ancestors, None, None)),
        (ops.draft_losses, (draft.requires_grad_(), target)),
    ]
    assert groups.CASES
    for op, arguments in calls:
        torch.library.opcheck(
            op, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )
