"""Structure of drafts as a value: trees that are optimal; the output stays what it is."""

import itertools

import pytest
import torch

import visspec
from tests.distributions import context_law
from tests.doubles import NEW, raises_line
from tests.test_eagle import make
from tests.tiny import llama, model_of, prompt, shapes
from visspec import registry
from visspec import tree as trees
from visspec.loop.draft_length import DraftLengthPolicy
from visspec.models.decoder.small_model import SmallModel
from visspec.models.drafting import static_tree as feature_tree
from visspec.models.eagle.drafter import EagleDrafter

VALUES = {
    "eagle2": ({"width": 3, "nodes": 9}, {"tree": "dynamic"}),
    "opt": ({"nodes": 7}, {"tree": "opt"}),
    "eagle": ({}, {"tree": "eagle"}),
    "counts": ({}, {"tree": "3-4-2"}),
}


def shaped(family, options, values):
    drafter = make(family, int(family != "llama"))
    for name, value in options.items():
        setattr(drafter, name, value)
    return drafter.shaped(**values)


class ByTurns(DraftLengthPolicy):
    """Drafts as deep as it may, in each structure of a drafter in turn."""

    def depth(self, state):
        state.trace.structure = self.structures[len(state.trace.rounds) % len(self.structures)]
        state.trace.requested = self.limit(state)
        return state.trace.requested


def by_turns(family, drafter, **options):
    """The drafter's model, and the drafts that it made: (structure, tree)."""
    seen, propose = [], drafter.propose
    fast = visspec.accelerate(model_of(family), drafter, length=ByTurns(drafter.traits.levels), **options)

    def watched(state, depth):
        draft = propose(state, depth)
        seen.append((state.structure, draft.tree))
        return draft

    drafter.propose = watched
    return fast, seen


@pytest.mark.parametrize(("value", "family"), [("eagle2", "llama"), ("opt", "llava"), ("eagle", "llava")])
def test_tokens_with_any_structure(value, family):
    """Chains where they are asked for, no more nodes than a structure has, and the tokens of plain decoding."""
    drafter = shaped(family, *VALUES[value])
    fast, seen = by_turns(family, drafter)
    plain = visspec.accelerate(model_of(family), None)
    inputs = prompt(family, shapes(family)["ragged"])
    sampled = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "seed": [3, 4, 5]}
    for options in ({"max_new_tokens": NEW, "do_sample": False}, sampled):
        assert torch.equal(fast.generate(**inputs, **options), plain.generate(**inputs, **options))
        assert fast.last_stats.faults == 0
    assert {structure for structure, _ in seen} == set(drafter.structures) and len(drafter.structures) > 1
    assert all(tree.chain == (structure.width == 1) for structure, tree in seen if tree.levels > 1)
    assert all(tree.size - 1 <= structure.size(tree.levels) for structure, tree in seen)


def test_the_rule_of_draws_takes_each_kind():
    for value in ("eagle2", "opt", "counts"):
        drafter = shaped("llama", *VALUES[value])
        fast = visspec.accelerate(model_of("llama"), drafter, acceptance="rejection", adaptive=False)
        fast.generate(**prompt("llama", ["9", "4"]), max_new_tokens=NEW, do_sample=True, seed=1)
        assert fast.last_stats.faults == 0


# --- static trees -----------------------------------------------------------------------------------------------------


def test_eagle_static_tree():
    tree, _ = feature_tree.plan(feature_tree.EAGLE, "cpu")
    assert tree.size - 1 == 25 and tree.depth[0].bincount()[1:].tolist() == [4, 8, 8, 3, 2]
    children = tree.parent[0].clamp(min=0).bincount(minlength=26).tolist()
    children[0] -= 1  # its own
    assert children[:9] == [4, 3, 2, 2, 1, 3, 2, 2, 1] and children[13] == 3 and children[21] == 2
    assert len(set(feature_tree.EAGLE)) == 25


def test_static_ranks():
    """Of a skipped rank too, and cut where fewer levels are asked for."""
    paths = ((0,), (2,), (2, 1), (2, 1, 0))
    distributions = torch.randn(1, 1, 9).log_softmax(-1)
    for depth in (1, 2, 3):
        some = tuple(path for path in paths if len(path) <= depth)
        planned = feature_tree.StaticTreeBuilder(torch.zeros(1, dtype=torch.long), some, None)
        for _ in range(depth):
            planned.grow(distributions)
        draft, order = planned.finish(0), distributions[0, 0].argsort(descending=True)
        ranked = [path[-1] for path in paths if len(path) <= depth]
        assert draft.value[0, 1:].tolist() == order[ranked].tolist() and draft.real.all()
    for wrong in (((0, 1),), ((0,), (1, 0))):  # a node without its parent
        with pytest.raises(ValueError, match="tree: got node"):
            feature_tree.plan(wrong, "cpu")


# --- trees of the drafter's laws --------------------------------------------------------------------------------------


def grown(distribution, width, nodes, depth, vocab):
    """The expected accepted nodes of a grown tree by its own law."""
    tree_builder, frontier = trees.TreeBuilder(torch.zeros(1, dtype=torch.long), width), [()]
    for _ in range(depth):
        tokens, above = tree_builder.grow(torch.stack([distribution(path).log() for path in frontier])[None].float())
        frontier = [(*frontier[a], t) for t, a in zip(tokens[0].tolist(), above[0].tolist())]
    draft = tree_builder.finish(nodes)
    value = draft.value[0].tolist()
    paths = [tuple(value[i] for i in path[1:] if i >= 0) for path in trees.paths(draft.tree)[0].tolist()]
    return sum(mass(distribution, path) for path in paths[1:])


def mass(distribution, path):
    share = 1.0
    for depth, token in enumerate(path):
        share *= float(distribution(path[:depth])[token])
    return share


def test_budget_tree_is_optimal():
    """Against all sets of the same size, as sums of products are largest over the largest products; a beam is less."""
    less = 0
    for seed in range(20):
        distribution, nodes, depth = context_law(4, seed, sharpness=0.7), 5, 3
        paths = [path for d in (1, 2, 3) for path in itertools.product(range(4), repeat=d)]
        every = sorted((mass(distribution, path) for path in paths), reverse=True)
        assert grown(distribution, nodes, nodes, depth, 4) == pytest.approx(sum(every[:nodes]), rel=1e-5)
        less += grown(distribution, 2, nodes, depth, 4) < sum(every[:nodes]) - 1e-4
    assert less > 5


# --- as options -------------------------------------------------------------------------------------------------------


def test_shapes_are_options_of_a_checkpoint(tmp_path):
    make("llama", 0).save_pretrained(tmp_path / "head", {})
    read = lambda options: registry.drafter(f"{tmp_path / 'head'}:{options}", model_of("llama"))[0]  # noqa: E731
    assert read("tree=eagle").paths == feature_tree.EAGLE and read("tree=eagle").traits.levels == 5
    assert read("tree=opt,nodes=9").width == 9
    assert read("tree=chain,width=4").width == 1 and read("tree=3").paths == ((0,), (1,), (2,))


BAD = {
    "tree=bush": "tree: got 'bush', expected one of chain, dynamic, opt, eagle, or counts",
    "tree=dynamic": "tree: got 'dynamic' with width 1",
    "tree=none.json": "tree: got 'none.json', expected one of",
    "tree=4-0": "shape: got '4-0'",
    "confidence=0.5": "drafter: head does not take 'confidence', expected tree",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_shapes(options, tmp_path):
    make("llama", 0).save_pretrained(tmp_path / "head", {})
    with raises_line(BAD[options]):
        registry.drafter(f"{tmp_path / 'head'}:{options}", model_of("llama"))


def test_a_drafter_without_trees():
    with pytest.raises(ValueError, match="tree: got 'opt' for SmallModel"):
        SmallModel(llama(seed=1), model_of("llama")).shaped(tree="opt")


def test_shapes_saved(tmp_path):
    model = llama(seed=5)
    head = make("llama", 0)
    EagleDrafter(head.head, model).save_pretrained(tmp_path / "head", {})
    for options, result in (("tree=eagle", feature_tree.EAGLE), ("tree=3-2", ((0,), (1,), (2,), (0, 0), (0, 1)))):
        visspec.accelerate(model, f"{tmp_path / 'head'}:{options}").save_pretrained(tmp_path / options)
        again = visspec.Accelerated.from_pretrained(tmp_path / options).drafter
        assert set(again.paths) == set(result)
    with pytest.raises(ValueError, match="but its weights have"):
        made = EagleDrafter(head.head, model).shaped(tree="eagle")
        visspec.accelerate(model, made).save_pretrained(tmp_path / "y")
