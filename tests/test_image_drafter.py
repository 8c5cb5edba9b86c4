"""The feature drafter of image tokens: laws it reports, laws it leaves, identity, rows, checkpoints and its recipe."""

import collections

import pytest
import torch

from tests.distributions import chi_square, context_law, output_law, plain_law, total_variation, verdicts
from tests.doubles import drafted, raises_line
from tests.tiny_images import janus, prompts
from visspec import registry
from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.accept.rejection import Rejection
from visspec.loop.decode import decode, open_request
from visspec.loop.draft_length import FixedLength
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.drafting import static_tree as feature_tree
from visspec.models.eagle.image_drafter import CaptureTarget, ImageFeatureDrafter
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.train.capture import capture
from visspec.types import Request, Sampling

V = 3  # codes that the drafter of the law tests knows
LAWS = {
    "chain": {"levels": 2}, "static": {"tree": "static", "shape": "2-2"}, "wide": {"tree": "static", "shape": "3-1"},
}  # fmt: skip


def family():
    return Janus(janus(), None)


def drafter(options=None, seed=1, **config):
    fresh = ImageFeatureDrafter.for_model(family(), seed=seed, **{"levels": 4, **config})
    with torch.no_grad():
        fresh.head.codes.weight.mul_(2.0)
        for table in (fresh.head.row, fresh.head.column):
            table.weight.mul_(5.0)
    return ImageFeatureDrafter(fresh.head, family(), **(options or {}))


def request(ids, attention, guidance=3.0, temperature=1.0, seed=0, **options):
    own, layout = family(), family().layout()
    with torch.no_grad():
        prompt = own.from_ids(ids, attention, guidance != 1)
    made = Request(
        prompt, ids, layout.positions, Sampling(temperature=temperature, guidance=guidance, **options), grid=layout.grid
    )
    if temperature:
        made.generators = [torch.Generator().manual_seed(seed + b) for b in range(len(ids))]
    return made


def run(made, used, rule=None, levels=None):
    target = ImageAR(family(), features=used is not None)
    guarded = None if used is None else SafeDrafter(used, target.capabilities)
    levels = levels or (used.traits.levels if used else 1)
    state = decode(target, guarded, rule or Exact(), made, FixedLength(levels))
    if guarded is not None:
        guarded.finish(state)
    return torch.tensor(state.tokens), state


@torch.inference_mode()
def proposed(used, target, scale, rows=4000, depth=2):
    """One draft for each of many seeds, all below the same prefix: tokens, parents and laws."""
    with torch.no_grad():
        used.head.codes.weight.mul_(scale)  # no draft so unlikely that it is not seen
        used.head.codes.bias[V:] = -1e4
    ids, attention = prompts(1)
    made = request(ids.expand(rows, -1), attention.expand(rows, -1))
    state, scores = open_request(target, Rejection(), made)
    state.pending = torch.full_like(state.pending, 5)
    used.start(state, scores)
    draft = used.propose(state, depth)
    return draft.value[:, 1:].tolist(), draft.tree.parent[0].tolist(), draft.q.p[..., :V].double()


def check_reported(tokens, parent, q):
    """Given everything above a node and the siblings before it, its law is always the reported one, and is reported."""
    for n in range(1, len(parent)):
        groups = collections.defaultdict(list)
        for row, drawn in enumerate(tokens):
            above, m = [], parent[n]
            while m > 0:
                above.append(drawn[m - 1])
                m = parent[m]
            siblings = [drawn[m - 1] for m in range(1, n) if parent[m] == parent[n]]
            groups[tuple(above), tuple(siblings)].append(row)
        for rows in groups.values():
            torch.testing.assert_close(q[rows, n], q[rows[:1], n].expand(len(rows), V), rtol=1e-4, atol=1e-6)
            counts = torch.bincount(torch.tensor([tokens[row][n - 1] for row in rows]), minlength=V)
            distribution = q[rows[0], n] / q[rows[0], n].sum()
            assert (distribution > 0.999).any() or chi_square(counts, distribution) > 1e-3


def rounds(p, parent, tokens, q):
    """Rounds of textbook rejection sampling: (probability, emitted tokens)."""
    draft = drafted(torch.tensor([[0, *tokens]]), trees.static(tuple(parent)), q[None])
    return [(share, gained) for gained, share in verdicts(p, (), draft)]


def path_law(parent, tokens, q):
    """Probability of a whole draft under the reported laws."""
    return float(torch.stack([q[n, tokens[n - 1]] for n in range(1, len(parent))]).prod())


def check_rejection(tokens, parent, q, seed, levels=2):
    """All drafts there are, by their reported laws: the next tokens have the law of plain sampling."""
    p = context_law(V, seed)
    distinct = {tuple(drawn): row for row, drawn in enumerate(tokens)}
    distribution = torch.zeros((V,) * (levels + 1), dtype=torch.float64)
    total = 0.0
    for drawn, row in distinct.items():
        weight = path_law(parent, drawn, q[row])
        total += weight
        distribution += weight * output_law(p, rounds(p, parent, drawn, q[row]), V, levels + 1)
    assert total == pytest.approx(1.0, abs=1e-5)  # every draft was seen, and the laws leave nothing out
    assert total_variation(distribution, plain_law(p, V, levels + 1)) < 1e-5
    flat = torch.full_like(q, 1 / V)  # the control: a law they were not drawn from
    off = sum(
        path_law(parent, drawn, q[row]) * output_law(p, rounds(p, parent, drawn, flat[row]), V, levels + 1)
        for drawn, row in distinct.items()
    )
    assert total_variation(off, plain_law(p, V, levels + 1)) > 1e-3


@pytest.mark.parametrize("kind", LAWS)
def test_reported_laws_and_rejection(kind):
    result = proposed(drafter(LAWS[kind]), CaptureTarget(family()), 0.4)
    check_reported(*result)
    for seed in range(2):
        check_rejection(*result, seed)


def test_a_rollout_is_what_drafting_says():
    """Step k of the rollout at image token t is level k + 1 of a chain that starts at token t - k."""
    ids, attention = prompts(3)
    used, target = drafter(), CaptureTarget(family())
    lesson = capture(target, Rejection(), request(ids, attention))
    joined = []
    watch = used.head.fc.register_forward_hook(lambda *args: joined.append(1))
    with torch.no_grad():
        steps = used.rollout(lesson, 3)
    watch.remove()
    assert len(steps) == len(joined) == 3, "the last step feeds none"
    codes = lesson.ids[:, lesson.prompt_length :]
    with torch.inference_mode():
        state, scores = open_request(target, Rejection(), request(ids, attention))
        used.start(state, scores)
        for t in range(5):
            assert torch.equal(state.pending, codes[:, t])
            feature = used._catch_up(state.memory, 3)
            for level in range(3):
                taught = used.trained_logits(steps[level].states[:, t + level], codes[:, t])
                torch.testing.assert_close(used._logits(feature), taught, rtol=1e-3, atol=1e-3)
                token = codes[:, t + level + 1]
                memory = state.memory
                turn, bias = memory.rope(memory.table, 1, level), memory.context_bias(1, level)
                feature = used.layer.step(memory, token, feature, bias, turn, level)
            draft = trees.empty_draft(state.pending)
            scores = target.verify(state, draft)
            state.memory.add(codes[:, t + 1 : t + 2], scores.features, [1] * 3)
            target.commit(state, draft, type("Paths", (), {"path": [[0]] * 3})())
            state.pending, state.position = codes[:, t + 1], state.position + 1
            for b in range(3):
                state.tokens[b].append(int(codes[b, t + 1]))


def test_static_tree_shapes():
    for counts in ((5, 13, 16, 14, 9), (4, 8, 8, 3, 2), (1, 1, 1), (2, 7), (32, 1)):
        tree, levels = feature_tree.plan(counts, "cpu")
        assert tree.depth[0].bincount()[1:].tolist() == list(counts)
        assert tree.chain == (max(counts) == 1)
        for depth, level in enumerate(levels[:-1]):
            parents, above = tree.parent[0][tree.depth[0] == depth + 2], (tree.depth[0] == depth + 1).nonzero()[:, 0]
            assert sorted(set(parents.tolist())) == above[level.open].tolist()
    children = collections.Counter(feature_tree.plan((3, 6), "cpu")[0].parent[0].tolist()[4:])
    assert children[1] >= children[2] >= children[3]  # likelier parents have no fewer


def test_more_siblings_than_codes_are_absent():
    pending, logp = torch.zeros(2, dtype=torch.long), torch.randn(2, 1, 4).log_softmax(-1)
    logp[..., 3] = float("-inf")
    planned = feature_tree.StaticTreeBuilder(pending, (5,), torch.zeros(2, 1, 4))
    planned.grow(logp)
    draft = planned.finish(0)
    assert not draft.real[:, 4:].any() and draft.real[:, 1:4].all()
    assert draft.q.p[:, 4:].sum() == 0 and (draft.q.p[:, 1:4].sum(-1) - 1).abs().max() < 1e-6


BAD = {
    "tree": ({"tree": "bush"}, "tree: got 'bush', expected one of chain"),
    "window": ({"tree": "static", "window": 4}, "window: got 4 for the tree 'static', expected a chain"),
    "places": ({"window": 1}, "levels: got 2, expected at most the window, 1"),
    "levels": ({"levels": 0}, "levels: got 0"), "width": ({"tree": "dynamic", "width": 0}, "width: got 0"),
    "nodes": ({"tree": "dynamic", "nodes": 0}, "nodes: got 0"),
    "words": ({"tree": "static", "shape": "4-many"}, "shape: got '4-many'"),
    "none": ({"tree": "static", "shape": "4-0-2"}, "shape: got '4-0-2'"),
    "too many": ({"tree": "static", "shape": 33}, "shape: got 33"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_options(what):
    options, message = BAD[what]
    with raises_line(message):
        drafter(options)


SHIPPED = registry.CHECKPOINTS / "painter-eagle" / "config.json"


@pytest.mark.skipif(not SHIPPED.is_file(), reason="the shipped drafter is not in this checkout")
def test_included_drafter():
    from visspec.api.loading import load_image_model

    model, _ = load_image_model("painter")
    loaded, name = registry.drafter("painter-eagle:tree=static,shape=3-3", model)
    assert name == "painter-eagle" and loaded.traits.levels == 2
    assert (SHIPPED.parent / "model.safetensors").stat().st_size < 6e6
    with pytest.raises(ValueError, match="painter-eagle is made for a model with"):
        registry.drafter("painter-eagle", janus())
