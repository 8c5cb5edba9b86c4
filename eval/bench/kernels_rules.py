"""The rows of `bench kernels` for LANTERN's rules as called by the engine.

`rule(draft, scores, noise)`: softmax of the distributions, neighbours, verdict, next token, drift and displacement. The
eager form is the acceptance of the published code on the same distributions, trees and uniforms, without drift and
displacement (`kernels_loops.published_loop`). Codes have 8 features, as in LlamaGen and Janus. N draft nodes, V
vocabulary, K codes.
"""

from functools import partial

import torch

from visspec import tree as trees
from visspec.accept import codebook
from visspec.accept.lantern import Lantern, LanternPlus
from visspec.distributions import Categorical
from visspec.eval.bench.kernels_loops import LEVELS, published_loop, verification_case
from visspec.types import Capabilities, Draft, Scores

LEVELS_26 = (4, 8, 8, 3, 2)  # nodes per depth of the published tree of 26 nodes, root aside
DRAWS = 40  # rounds with different uniforms
RULES = (  # name, rule, whether drafts are sampled with a distribution
    ("rule lantern", partial(Lantern, k=1000, delta=0.1), False),
    ("rule lantern_plus", partial(LanternPlus, k=1000, lam=2.0), True),
    ("rule lantern published", partial(Lantern, k=1000, delta=0.1, compat="repository"), False),
    ("rule lantern_plus published", partial(LanternPlus, k=1000, lam=2.0, compat="repository"), True),
)


def sample_siblings(tokens_BN, parent, p_NV, seed=1):
    """Siblings sampled without replacement from distributions near p: (tokens (1, N), q (1, N, V))."""
    g, distributions, tokens_BN = torch.Generator().manual_seed(seed), {}, tokens_BN.clone()
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


def rule_and_loop(rule, levels, samples, device="cpu", V=16384, features=8, draws=DRAWS):
    """(a call of the rule, a call of the published loop), both with the index of the uniforms; one row."""
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
    noise = [rule.make_noise([torch.Generator(device).manual_seed(i)], V) for i in range(draws)]
    tossed = [n.accept_uniforms(tree) for n in noise]
    table = codebook.neighbours(codes_KE.to(device), rule.k + 1, V).cpu().numpy().astype("uint16")  # as published
    q_NV, paths = None if q is None else q.p[0], case["paths"].to(device)
    laws_PDV = distribution.logits[0][paths]  # copied beforehand, as published
    limit = {rule.bound: rule.value}

    def ours(i):
        return rule(draft, scores, noise[i % draws])

    def theirs(i):
        coins_BN, draw_B = tossed[i % draws]
        uniforms, draw = coins_BN[0].tolist(), draw_B[0]
        return published_loop(draft.value[0], paths, laws_PDV, q_NV, table, rule.k, uniforms, draw, **limit)

    return ours, theirs


def rule_jobs(device, job, V=16384):
    """The rows; `job` makes one of (kernel, shape, dtype, build, bytes, against) and options."""
    rows = []
    for name, make, samples in RULES:
        for levels in (LEVELS_26, LEVELS):
            N = sum(levels) + 1
            # about two distributions read and written, a sample; also of the drafts
            moved = 4 * V * (8 if samples else 4)
            build = partial(rule_and_loop, make(), levels, samples, device)
            against = "the published loop, from warped logits on"
            rows.append(job(name, f"{N}x{V} k=1000", "float32", build, moved, against, draws=DRAWS))
    return rows
