"""Random arguments of every operator, and the sizes and kinds that its tests run through."""

import torch


def accept(
    seed, rows=4, nodes=7, vocabulary=11, drawn=False, dtype=torch.float32, relaxed=False, near=None,
    chain=False,
):  # fmt: skip
    """Return arguments of `accept_tree`: random trees with padding, repeated siblings and peaked laws.

    near: "delta" or "lam" adds a table of neighbors. chain: chains of different lengths instead of trees.
    """
    g = torch.Generator().manual_seed(seed)
    shape = (rows, nodes, vocabulary)
    sharp = torch.randint(1, 6, (rows, 1, 1), generator=g)
    p = (torch.randn(shape, generator=g) * sharp).softmax(-1)
    q = (torch.randn(shape, generator=g) * sharp + p.log().clamp_min(-9)).softmax(-1)
    parent = (torch.rand(rows, nodes, generator=g) * torch.arange(nodes)).long()
    parent[:, 0] = -1
    parent[torch.rand(rows, nodes, generator=g) < 0.05] = -1
    if chain:
        order = torch.arange(nodes)
        parent = torch.where(order < torch.randint(1, nodes + 1, (rows, 1), generator=g), order - 1, -1)
    likely = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(rows, nodes)
    tokens = torch.where(torch.rand(rows, nodes, generator=g) < 0.2, likely.roll(1, 1), likely)
    case: dict[str, torch.Tensor | float | None] = {
        "tokens": tokens,
        "parent": parent,
        "p": p.to(dtype),
        "q": q.to(dtype) if drawn else None,
        "uniforms": torch.rand(rows, nodes, generator=g),
        "draw": torch.rand(rows, generator=g),
    }
    if relaxed:
        case["mass"] = torch.rand(rows, nodes, generator=g) * 0.3 - 0.05
    if near:
        table = torch.rand(vocabulary, vocabulary, generator=g).argsort(1)[:, : vocabulary // 2]
        case.update({"neighbours": table, near: 0.15 if near == "delta" else 3.0})
    return case


POINT_MASSES = [{}, {"relaxed": True}, {"near": "delta"}, {"near": "lam"}]
ACCEPT_KINDS = [*POINT_MASSES, *({"drawn": True} | kind for kind in POINT_MASSES)]
ACCEPT = [
    {"nodes": 1, "vocabulary": 5},
    {"nodes": 7, "vocabulary": 11},
    {"nodes": 7, "vocabulary": 11, "relaxed": True},
    {"nodes": 7, "vocabulary": 11, "drawn": True},
    {"nodes": 6, "vocabulary": 9, "drawn": True, "relaxed": True},
    {"nodes": 6, "drawn": True, "chain": True},
    {"nodes": 6, "relaxed": True, "chain": True},
    {"nodes": 6, "vocabulary": 9, "drawn": True, "relaxed": True, "chain": True},
    {"nodes": 9, "vocabulary": 33, "drawn": True, "chain": True, "dtype": torch.bfloat16},
    {"near": "delta"},
    {"near": "lam", "drawn": True},
    {"nodes": 6, "vocabulary": 200, "near": "lam"},
    {"rows": 20, "nodes": 9, "vocabulary": 40, "near": "delta"},
    {"nodes": 9, "vocabulary": 33, "near": "lam", "dtype": torch.bfloat16},
    {"nodes": 9, "vocabulary": 33, "dtype": torch.bfloat16},
    {"nodes": 9, "vocabulary": 33, "drawn": True, "dtype": torch.bfloat16},
    {"nodes": 5, "vocabulary": 2100, "rows": 2},
]


def attention(seed, rows=2, heads=4, groups=2, nodes=6, slots=40, features=16, padded=False, dtype=torch.float32):
    """Return arguments of `tree_attention`: random trees at random lengths in a longer cache."""
    g = torch.Generator().manual_seed(seed)
    parent = (torch.rand(rows, nodes, generator=g) * torch.arange(nodes)).long()
    parent[:, 0] = -1
    length = torch.randint(3, slots - nodes + 1, (rows,), generator=g)
    case = {
        "q": torch.randn(rows, heads, nodes, features, generator=g).to(dtype),
        "k": torch.randn(rows, groups, slots, features, generator=g).to(dtype),
        "v": torch.randn(rows, groups, slots, features, generator=g).to(dtype),
        "length": length,
        "parent": parent,
    }
    if padded:
        case["start"] = torch.randint(0, 4, (rows,), generator=g)
    return case


ATTENTION = [
    {},
    {"padded": True, "groups": 1},
    {"heads": 6, "groups": 3, "features": 10, "nodes": 9},
    {"nodes": 1, "heads": 2, "groups": 2},
    {"dtype": torch.bfloat16},
]


def commit(seed, rows=3, heads=2, slots=20, features=6, nodes=8, tensors=2, dtype=torch.float32):
    """Return arguments of `commit_kv`: random ascending paths, and one row that keeps nothing."""
    g = torch.Generator().manual_seed(seed)
    kv = [torch.randn(rows, heads, slots, features, generator=g).to(dtype) for _ in range(tensors)]
    length = torch.randint(0, slots - nodes + 1, (rows,), generator=g)
    count = torch.randint(1, nodes + 1, (rows,), generator=g)
    count[0] = 0
    path = torch.full((rows, nodes), -1)
    for b, n in enumerate(count.tolist()):
        path[b, :n] = torch.cat(
            (torch.zeros(1, dtype=torch.long), torch.randperm(nodes - 1, generator=g)[: n - 1].sort().values + 1)
        )[:n]
    return {"kv": kv, "length": length, "path": path, "count": count}


COMMIT = [{}, {"dtype": torch.bfloat16, "tensors": 4}, {"features": 1, "slots": 8}, {"rows": 1, "tensors": 1}]


def groups(seed, rows=4, vocabulary=29, group=4, drawn=True, ties=False):
    """Return arguments of `grouped_mass`; with ties, distributions with many equal entries."""
    g = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, rows, vocabulary, generator=g)
    p, token = (p.round() if ties else p).softmax(-1), torch.randint(vocabulary, (rows,), generator=g)
    return {"p": p, "q": q.softmax(-1) if drawn else None, "token": token, "group": group}


GROUPS = [
    {"group": 6},
    {"group": 7, "ties": True, "drawn": False},
    {"group": 60, "vocabulary": 17},
]


def neighbours(seed, rows=5, vocabulary=23, k=9, delta=None, lam=None, dtype=torch.float32, indirect=False):
    """Return arguments of `neighbour_mass`."""
    g = torch.Generator().manual_seed(seed)
    p = (torch.randn(rows, vocabulary, generator=g) * 1.5).softmax(-1)
    neighbours = torch.rand(vocabulary, vocabulary, generator=g).argsort(1)[:, :k]
    case = {"p": p.to(dtype), "token": torch.randint(vocabulary, (rows,), generator=g), "neighbours": neighbours}
    if indirect:
        case["row"] = torch.randint(rows, (rows,), generator=g)
    return {**case, "delta": delta, "lam": lam}


NEIGHBOURS = [
    {"delta": 0.1},
    {"lam": 3.0},
    {"delta": 0.0},
    {"delta": 2.0},
    {"delta": 0.3, "k": 300, "vocabulary": 301},
    {"lam": 5.0, "indirect": True, "dtype": torch.bfloat16},
]


def warp(seed, rows=3, vocabulary=37, guided=False, ties=False, uniform=False, dtype=torch.float32, **sampling):
    """Return arguments of `guided_warp`; with ties, logits on a coarse grid, some of them -inf."""
    g = torch.Generator().manual_seed(seed)
    c, u = torch.randn(2, rows, vocabulary, generator=g) * (0 if uniform else 2)
    if ties:
        c, u = c.round(), u.round()
        c[:, ::7] = float("-inf")
    return {"logits": c.to(dtype), "uncond": u.to(dtype) if guided else None, **sampling}


WARP = [
    {},
    {"guided": True, "guidance": 7.5, "temperature": 0.7},
    {"guided": True, "guidance": 3.0, "top_k": 5, "ties": True},
    {"top_p": 0.8, "temperature": 1.3},
    {"top_p": 0.6, "top_k": 9, "ties": True},
    {"top_p": 0.0, "ties": True},
    {"top_p": 0.6, "uniform": True, "vocabulary": 10},
    {"top_p": 0.2, "uniform": True, "vocabulary": 10},
    {"top_p": 0.9, "uniform": True, "vocabulary": 700, "top_k": 50},
    {"temperature": 0.0, "guided": True, "guidance": 2.0},
    {"vocabulary": 4100, "rows": 1, "top_k": 50, "top_p": 0.9, "dtype": torch.bfloat16},
]
