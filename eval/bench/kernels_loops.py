"""Eager implementations of a relaxed tree verification for `bench kernels`, and the tree for timing them.

The first two give the decisions of `accept_tree` for the same uniforms (tested), so the same rule is timed. The last
one is the rule of LANTERN's published code, with the decisions of `compat="repository"` (tested).
P paths, D levels, N draft nodes, V vocabulary, K neighbours.
"""

import torch

from visspec import kernels

LEVELS = (10, 16, 14, 10, 8)  # nodes per depth of a 59-node tree, root aside


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


def loop_over_paths(tokens, paths, p, neighbours, delta, uniforms, draw, copied=True):
    """Our rule in a loop structured like the published implementations, from warped distributions.

    Every level selects the paths with the accepted prefix and tests their tokens: the probabilities of all K neighbours
    (a numpy table on the host), a running sum, the last entry within the bound, a branch on the host; after a rejection
    the token is zeroed and the distribution renormalised. copied: first expand the distributions of the nodes to (P, D,
    V), as in the published code. Warping is not included. paths (P, D) with -1 as padding, the rest as in
    `loop_over_children`.
    """
    candidates = torch.where(paths >= 0, tokens[paths], -1)
    laws_PDV = p[paths] if copied else None
    levels = paths.shape[1]
    prefix, accepted, best, adjusted = candidates[0, :1], 1, 0, False

    def law_at(path, depth):
        return p[paths[path, depth]] if laws_PDV is None else laws_PDV[path, depth]

    for depth in range(1, levels):
        if accepted != depth:
            break
        adjusted, tried = False, []
        same = (candidates[:, :accepted] == prefix).all(dim=1)
        first = torch.nonzero(same, as_tuple=True)[0][0]
        row = law_at(first, depth - 1)
        law, lender = row.clone(), row.clone()
        for j in range(paths.shape[0]):
            if same[j]:
                x = candidates[j, depth].item()
                if x in tried or x == -1:
                    continue
                tried.append(x)
                summed = torch.cumsum(lender[neighbours[x]], dim=0)
                kept = (summed <= delta).nonzero(as_tuple=True)[0]
                px = law[x] if kept.numel() == 0 else law[x] + summed[kept[-1]]
                if uniforms[paths[j, depth]] < px:
                    prefix = torch.cat((prefix, candidates[j, depth][None]))
                    accepted, best = accepted + 1, j
                    break
                lender[neighbours[x, : kept.numel()]] = 0
                law[x] = lender[x] = 0
                if law.sum() == 0:
                    law = torch.ones_like(law)
                lender /= law.sum()
                law /= law.sum()
                adjusted = True
    if not adjusted or accepted == levels:
        law = law_at(best, accepted - 1)
    path = paths[best, :accepted].tolist()
    return path, int(torch.searchsorted(law.cumsum(0), draw * law.sum(), right=True))


def published_loop(tokens, paths, scores, q, neighbours, k, uniforms, draw, delta=None, lam=None):
    """Our implementation of the acceptance of LANTERN's published code, from warped logits, on the host.

    As `loop_over_paths`, but from log-distributions scores (P, D, V), already copied to the paths: a softmax of each
    reached node, and the published residuals, see `visspec.accept.published`. tokens (N,), q (N, V) or None for point
    masses, neighbours (V, k + 1) a numpy array, uniform numbers a list of N floats.
    """
    candidates = torch.where(paths >= 0, tokens[paths], -1)
    levels, prefix, accepted, best, adjusted = paths.shape[1], candidates[0, :1], 1, 0, False
    for depth in range(1, levels):
        if accepted != depth:
            break
        adjusted, tried = False, []
        same = (candidates[:, :accepted] == prefix).all(dim=1)
        law = torch.softmax(scores[torch.nonzero(same, as_tuple=True)[0][0], depth - 1], dim=0)
        for j in range(paths.shape[0]):
            if same[j]:
                x, n = int(candidates[j, depth]), paths[j, depth]
                if x in tried or x == -1:
                    continue
                tried.append(x)
                near, px = neighbours[x], law[x]
                summed = torch.cumsum(law[near[:k]].reshape(k, 1), dim=0)
                kept = (summed <= (delta if lam is None else (lam - 1) * px)).nonzero(as_tuple=True)[0]
                if kept.numel():
                    px = px + summed[kept[-1]]
                if uniforms[n] < (px if q is None else px / q[n, x]):
                    prefix = torch.cat((prefix, candidates[j, depth][None]))
                    accepted, best = accepted + 1, j
                    break
                if q is None:
                    law[x] = 0
                    if kept.numel():
                        law[near] = 0
                else:
                    drawn = q[n].clone()
                    if kept.numel():
                        drawn[near] = 0
                    law = law - drawn
                    law[law < 0] = 0
                if law.sum() == 0:
                    law = torch.ones_like(law)
                law = law / law.sum()
                adjusted = True
    if not adjusted or accepted == levels:
        law = torch.softmax(scores[best, accepted - 1], dim=0)
    path = paths[best, :accepted].tolist()
    return path, int(torch.searchsorted(law.cumsum(0), draw * law.sum(), right=True))


def paths_of(parent):
    """(P, D) the nodes from the root to each leaf of a tree, given as a list of parents, padded with -1."""
    chains = []
    for n in range(len(parent)):
        if n not in parent:
            chain = [n]
            while chain[0] != 0:
                chain.insert(0, parent[chain[0]])
            chains.append(chain)
    width = max(map(len, chains))
    return torch.tensor([chain + [-1] * (width - len(chain)) for chain in sorted(chains)])


def verification_case(device, nodes_per_level=LEVELS, V=16384, K=1000, seed=0, draws=64):
    """A 59-node tree of likely tokens under flat distributions (top-1 about 7 %, top-1000 kept), and `draws` uniforms.

    `logits` (N, V) give the distributions p (1, N, V). The table of neighbours is int32, as in the rules.
    """
    g = torch.Generator().manual_seed(seed)
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
    case = {
        "tokens": tokens,
        "parent": torch.tensor([parent]),
        "neighbours": neighbours.int(),
        "paths": paths_of(parent),
    }
    case.update(
        logits=logits, p=p, uniforms=torch.rand(draws, 1, N, generator=g), draw=torch.rand(draws, 1, generator=g)
    )
    return {k: v.to(device) for k, v in case.items()}
