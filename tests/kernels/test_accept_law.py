"""The law that acceptance keeps, integrated over the uniforms to 1e-12, with broken rules that must be caught."""

import itertools

import pytest
import torch

from visspec.kernels import accept_tree


def threshold(decide, count, steps=60):
    """Measure of the uniforms u in [0, 1) for which decide(u) holds, a down-set in u: bisection, `count` at once."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(steps):
        middle = (low + high) / 2
        inside = decide(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return (low + high) / 2


def first_token_law(verify, tokens, parent, p, q):
    """Exact law (C, V) of the token after node 0, over the uniforms: tokens (C, N), p (N, V), q (C, N, V)."""
    (C, N), V = tokens.shape, p.shape[1]
    children = [n for n in range(1, N) if int(parent[n]) == 0]
    reject = torch.full((N,), 1 - 2.0**-40, dtype=torch.float64)

    def run(uniforms, draw, repeats):
        distributions = None if q is None else q.repeat_interleave(repeats, 0)
        return verify(
            tokens.repeat_interleave(repeats, 0), parent, p.expand(len(draw), N, V), distributions, uniforms, draw
        )

    def accepted(u):
        uniforms = reject.repeat(C * len(children), 1)
        uniforms[torch.arange(len(u)), picks] = u
        return (run(uniforms, torch.zeros_like(u), len(children))[0] == picks.unsqueeze(1)).any(1)

    picks = torch.tensor(children).repeat(C)
    distribution, alive = torch.zeros(C, V, dtype=torch.float64), torch.ones(C, dtype=torch.float64)
    for n, f in zip(children, threshold(accepted, C * len(children)).view(C, -1).unbind(1)):
        distribution.scatter_add_(1, tokens[:, n : n + 1], (alive * f).unsqueeze(1))
        alive = alive * (1 - f)
    order = torch.arange(V).repeat(C)
    below = threshold(lambda u: run(reject.repeat(C * V, 1), u, V)[2] <= order, C * V).view(C, V)
    return distribution + alive.unsqueeze(1) * below.diff(prepend=torch.zeros(C, 1, dtype=torch.float64))


def total_variation(verify, drawn, seed):
    """TV between p[0] and the law of the first token, averaged over the draft when it is drawn."""
    g = torch.Generator().manual_seed(seed)
    V, parent = 4, torch.tensor([-1, 0, 0, 0])
    p = (torch.randn(4, V, generator=g, dtype=torch.float64) * 1.5).softmax(-1)
    if not drawn:
        return (first_token_law(verify, torch.tensor([[0, 2, 0, 3]]), parent, p, None)[0] - p[0]).abs().sum().item() / 2
    # The first two siblings are drawn without replacement, the third independently from another law.
    base, other = torch.randn(2, V, generator=g, dtype=torch.float64).softmax(-1)
    tokens, weights, distributions = [], [], []
    for x, y, z in itertools.product(range(V), repeat=3):
        if x != y:
            rest = base.index_fill(0, torch.tensor(x), 0) / (1 - base[x])
            tokens.append([0, x, y, z])
            weights.append(base[x] * rest[y] * other[z])
            distributions.append(torch.stack((base, base, rest, other)))
    distribution = first_token_law(verify, torch.tensor(tokens), parent, p, torch.stack(distributions))
    return (torch.stack(weights) @ distribution - p[0]).abs().sum().item() / 2


def tree(tokens, parent, p, q, uniforms, draw):
    return accept_tree(tokens, parent, p, q, uniforms, draw, depth=1, branch=3)


def inflated(tokens, parent, p, q, uniforms, draw):
    return tree(tokens, parent, p, q, uniforms / 1.01, draw)


def no_residual(tokens, parent, p, q, uniforms, draw):
    """`next` comes from the law of the last node as it was: a bonus token where a residual is due."""
    path, length, _, drift = tree(tokens, parent, p, q, uniforms, draw)
    running = p[torch.arange(len(draw)), path.amax(1)].cumsum(1)
    return path, length, torch.searchsorted(running, draw.unsqueeze(1), right=True).squeeze(1).clamp_max(3), drift


def no_renormalisation(tokens, parent, p, q, uniforms, draw):
    """Later siblings are tried with p(x) in place of r(x): the mass of the rejected ones is forgotten."""
    px = p[:, 0].gather(1, tokens)
    px[:, 0] = 0
    return tree(tokens, parent, p, q, uniforms / (1 - px.cumsum(1) + px), draw)


def wrong_draft_law(tokens, parent, p, q, uniforms, draw):
    """The ratio's q is sharpened, as when it is stored before the warp."""
    return tree(tokens, parent, p, (q.log() * 1.1).softmax(-1), uniforms, draw)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_tree_keeps_the_target_law(drawn, seed):
    assert total_variation(tree, drawn, seed) < 1e-12


@pytest.mark.parametrize("seed", [0, 1])
def test_chain_keeps_the_target_law(seed):
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, 2, 4, generator=g, dtype=torch.float64)).softmax(-1)
    tokens = torch.tensor([[0, x] for x in range(4)])

    def verify(tokens, parent, p, q, uniforms, draw):
        return accept_tree(tokens, parent, p, q, uniforms, draw, branch=1)

    distribution = q[1] @ first_token_law(verify, tokens, torch.tensor([-1, 0]), p, q.expand(4, 2, 4))
    assert (distribution - p[0]).abs().sum() / 2 < 1e-12


@pytest.mark.parametrize(("verify", "drawn"), [
    (inflated, False), (inflated, True), (no_residual, False), (no_residual, True), (no_renormalisation, False),
    (wrong_draft_law, True),
])  # fmt: skip
def test_broken_rules_are_caught(verify, drawn):
    assert total_variation(verify, drawn, 0) > 1e-4


def test_law_below_accepted_node():
    """The second level of a tree, given that its parent was accepted, is the first level of the subtree."""
    g = torch.Generator().manual_seed(7)
    p = torch.randn(1, 5, 4, generator=g, dtype=torch.float64).softmax(-1)
    parent = torch.tensor([[-1, 0, 1, 1, 0]])
    tokens = torch.tensor([[0, 1, 2, 3, 0]])
    for _ in range(200):
        uniforms = torch.rand(1, 5, generator=g, dtype=torch.float64)
        draw = torch.rand(1, generator=g, dtype=torch.float64)
        uniforms[0, 1] = 0
        path, _, following, _ = accept_tree(tokens, parent, p, None, uniforms, draw)
        keep = torch.tensor([1, 2, 3])
        inner, _, second, _ = accept_tree(
            tokens[:, keep], torch.tensor([[-1, 0, 0]]), p[:, keep], None, uniforms[:, keep], draw
        )
        assert torch.equal(path[path > 0][1:], keep[inner[inner > 0]]) and torch.equal(following, second)
