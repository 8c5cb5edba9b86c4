"""Eager implementations of a relaxed tree verification for `bench kernels`, and the tree for timing them.

The first two give the decisions of `accept_tree` for the same uniforms (tested), so the same rule is timed. The last
one is the rule of LANTERN's published code; `rule_and_loop` has
it beside the rule as called by the engine.
P paths, D levels, N draft nodes, V vocabulary, K neighbours, E features of a code.
"""

import torch

from visspec import kernels
from visspec import tree as trees
from visspec.accept import codebook
from visspec.accept.lantern import Lantern
from visspec.distributions import Categorical
from visspec.types import Capabilities, Draft, Scores

LEVELS = (10, 16, 14, 10, 8)  # nodes per depth of a 59-node tree, root aside
ROUNDS = 40  # with different uniforms, of a rule


def loop_over_children(tokens, parent, p, neighbours, delta, uniforms, draw):
    """Tests the children of the current node one by one until one is accepted; without neighbours: the exact rule.

    tokens (N), parent (N), p (N, V), neighbours (V, K) or None, uniform numbers (N), draw ().
    """
    children: dict[int, list[int]] = {}
    for n, above in enumerate(parent.tolist()):
        children.setdefault(above, []).append(n)
    current, path = 0, [0]
    law = p[0]
    while children.get(current):
        law = p[current].clone()
        lender = law.clone()
        for n in children[current]:
            x = tokens[n]
            mass = 0.0
            if neighbours is not None:
                summed = lender[neighbours[x]].cumsum(0)
                kept = summed[summed <= delta]
                mass = kept[-1] if kept.numel() else 0.0
                lender[neighbours[x][: kept.numel()]] = 0
            if uniforms[n] < law[x] + mass:
                current, law = n, p[n]
                path.append(n)
                break
            law[x] = lender[x] = 0
            lender = lender / law.sum()
            law = law / law.sum()
        else:
            break
    return path, int(torch.searchsorted(law.cumsum(0), draw * law.sum(), right=True))


def _walk_paths(tokens, paths, laws_at, test, uniforms, draw):
    """A loop structured like the published implementations: every level selects the paths with the accepted prefix and
    tests their tokens, with a branch on the host; then the next token is drawn.

    laws_at(path, depth): the distribution of a node, the first of a tuple. test(x, n, laws): the probability of
    accepting token x at node n, and a function that gives the laws after its rejection.
    """
    candidates = torch.where(paths >= 0, tokens[paths], -1)
    levels, prefix, accepted, best, adjusted = paths.shape[1], candidates[0, :1], 1, 0, False
    laws = laws_at(0, 0)
    for depth in range(1, levels):
        if accepted != depth:
            break
        adjusted, tried = False, []
        same = (candidates[:, :accepted] == prefix).all(dim=1)
        laws = laws_at(torch.nonzero(same, as_tuple=True)[0][0], depth - 1)
        for j in range(paths.shape[0]):
            if same[j]:
                x, n = candidates[j, depth].item(), paths[j, depth]
                if x in tried or x == -1:
                    continue
                tried.append(x)
                probability, rejected = test(x, n, laws)
                if uniforms[n] < probability:
                    prefix = torch.cat((prefix, candidates[j, depth][None]))
                    accepted, best = accepted + 1, j
                    break
                laws, adjusted = rejected(), True
    law = laws[0] if adjusted and accepted != levels else laws_at(best, accepted - 1)[0]
    path = paths[best, :accepted].tolist()
    return path, int(torch.searchsorted(law.cumsum(0), draw * law.sum(), right=True))


def loop_over_paths(tokens, paths, p, neighbours, delta, uniforms, draw, copied=True):
    """Our rule over paths, from warped distributions.

    The probabilities of all K neighbours (a numpy table on the host), a running sum, the last entry within the bound;
    after a rejection the token is zeroed and the distribution renormalised. copied: first expand the distributions of
    the nodes to (P, D, V), as in the published code. Warping is not included. paths (P, D) with -1 as padding, the rest
    as in `loop_over_children`.
    """
    laws_PDV = p[paths] if copied else None

    def laws_at(path, depth):
        row = p[paths[path, depth]] if laws_PDV is None else laws_PDV[path, depth]
        return row.clone(), row.clone()  # the second lends mass to neighbours

    def test(x, n, laws):
        law, lender = laws
        summed = torch.cumsum(lender[neighbours[x]], dim=0)
        kept = (summed <= delta).nonzero(as_tuple=True)[0]

        def rejected():
            lender[neighbours[x, : kept.numel()]] = 0
            law[x] = lender[x] = 0
            left = torch.ones_like(law) if law.sum() == 0 else law
            return left / left.sum(), lender / left.sum()

        return law[x] if kept.numel() == 0 else law[x] + summed[kept[-1]], rejected

    return _walk_paths(tokens, paths, laws_at, test, uniforms, draw)


def published_loop(tokens, paths, scores, q, neighbours, k, uniforms, draw, delta=None, lam=None):
    """Our implementation of the acceptance of LANTERN's published code, from warped logits, on the host.

    As `loop_over_paths`, but from log-distributions scores (P, D, V), already copied to the paths: a softmax of each
    reached node, and the published residuals. tokens (N,), q (N, V) or None for point
    masses, neighbours (V, k + 1) a numpy array, uniform numbers a list of N floats.
    """

    def laws_at(path, depth):
        return (torch.softmax(scores[path, depth], dim=0),)

    def test(x, n, laws):
        (law,) = laws
        near, px = neighbours[x], law[x]
        summed = torch.cumsum(law[near[:k]].reshape(k, 1), dim=0)
        kept = (summed <= (delta if lam is None else (lam - 1) * px)).nonzero(as_tuple=True)[0]
        if kept.numel():
            px = px + summed[kept[-1]]

        def rejected():
            if q is None:
                law[x], left = 0, law
                if kept.numel():
                    law[near] = 0
            else:
                drawn = q[n].clone()
                if kept.numel():
                    drawn[near] = 0
                left = (law - drawn).clamp_min(0)
            left = torch.ones_like(left) if left.sum() == 0 else left
            return (left / left.sum(),)

        return (px if q is None else px / q[n, x]), rejected

    return _walk_paths(tokens, paths, laws_at, test, uniforms, draw)


def paths_of(parent):
    """(P, D) the nodes from the root to each leaf of a tree, given as a list of parents, padded with -1."""
    chains = trees.paths(trees.static(tuple(parent)))[0].tolist()
    return torch.tensor(sorted(chain for n, chain in enumerate(chains) if n not in parent))


def verification_case(device, nodes_per_level=LEVELS, V=16384, K=1000, draws=64):
    """A 59-node tree of likely tokens under flat distributions (top-1 about 7 %, top-1000 kept), and `draws` uniforms.

    `logits` (N, V) give the distributions p (1, N, V). The table of neighbours is int32, as in the rules.
    """
    g = torch.Generator().manual_seed(0)
    parent, last = [-1], [0]
    for count in nodes_per_level:
        first = len(parent)
        parent += sorted(last[i % min(5, len(last))] for i in range(count))
        last = list(range(first, first + count))
    N = len(parent)
    logits = torch.randn(N, V, generator=g) * 2.0
    p = kernels.guided_warp(logits, top_k=1000).unsqueeze(0)
    best = p[0].topk(20).indices
    place = [parent[:n].count(above) for n, above in enumerate(parent)]
    tokens = torch.stack([best[max(above, 0), k] for above, k in zip(parent, place)]).unsqueeze(0)
    neighbours = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(256)])[torch.arange(V) % 256]
    uniforms, draw = torch.rand(draws, 1, N, generator=g), torch.rand(draws, 1, generator=g)
    case = {"tokens": tokens, "parent": torch.tensor([parent]), "neighbours": neighbours.int()}
    case |= {"paths": paths_of(parent), "logits": logits, "p": p, "uniforms": uniforms, "draw": draw}
    return {k: v.to(device) for k, v in case.items()}


def sample_siblings(tokens_BN, parent, p_NV):
    """Siblings sampled without replacement from distributions near p: (tokens (1, N), q (1, N, V))."""
    g, distributions, tokens_BN = torch.Generator().manual_seed(1), {}, tokens_BN.clone()
    q_BNV = torch.zeros(1, *p_NV.shape)
    for n in range(1, len(parent)):
        above = parent[n]
        if above not in distributions:
            distributions[above] = (p_NV[above].log() + 0.7 * torch.randn(p_NV.shape[1], generator=g)).softmax(-1)
        law_V = distributions[above].clone()
        law_V[[int(tokens_BN[0, m]) for m in range(1, n) if parent[m] == above]] = 0.0
        q_BNV[0, n] = law_V / law_V.sum()
        tokens_BN[0, n] = torch.multinomial(q_BNV[0, n], 1, generator=g)
    return tokens_BN, q_BNV


def rule_and_loop(rule: Lantern, levels, samples, device="cpu", V=16384, features=8):
    """(a call of the rule, a call of the published loop), both with the index of the uniforms; one row.

    The rule: softmax of the distributions, neighbours, verdict, next token, drift and displacement; the loop without
    the last two. Codes have 8 features, as in LlamaGen and Janus.
    """
    case = verification_case("cpu", levels, V, K=1, draws=1)
    parent, p_NV, tokens_BN, q_BNV = case["parent"][0].tolist(), case["p"][0], case["tokens"], None
    if samples:
        tokens_BN, q_BNV = sample_siblings(tokens_BN, parent, p_NV)
    drawn_KE = torch.randn(V, features, generator=torch.Generator().manual_seed(2))
    codes_KE = torch.nn.functional.normalize(drawn_KE, dim=1)
    rule.bind(Capabilities(vocab=V, codebook=codes_KE.to(device)))
    tree = trees.static(tuple(parent), str(device))
    distribution = Categorical(p_NV.log()[None].to(device))
    scores = Scores(distribution)
    q = None if q_BNV is None else Categorical(p=q_BNV.to(device))
    draft = Draft(tokens_BN.to(device), tree, q)
    noise = [rule.make_noise([torch.Generator(device).manual_seed(i)], V) for i in range(ROUNDS)]
    tossed = [n.accept_uniforms(tree) for n in noise]
    table = codebook.neighbours(codes_KE.to(device), rule.k + 1, V).cpu().numpy().astype("uint16")  # as published
    q_NV, paths = None if q is None else q.p[0], case["paths"].to(device)
    laws_PDV = distribution.logits[0][paths]  # copied beforehand, as published
    limit = {rule.bound: rule.value}

    def ours(i):
        return rule(draft, scores, noise[i % ROUNDS])

    def theirs(i):
        coins_BN, draw_B = tossed[i % ROUNDS]
        uniforms, draw = coins_BN[0].tolist(), draw_B[0]
        return published_loop(draft.value[0], paths, laws_PDV, q_NV, table, rule.k, uniforms, draw, **limit)

    return ours, theirs
