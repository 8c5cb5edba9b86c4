"""Drafters that write into what they are handed, that lie about their drafts, or both: the output is the plain one."""

import contextlib
import dataclasses
import gc
import random
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch

from tests import tiny_images
from tests.doubles import Double, chain_of, compact, drafted, fast, new_tokens
from tests.tables import Table, TableDrafter, TableTarget, decoded
from tests.tiny import VOCAB, prompt, shapes
from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.accept.local import Local
from visspec.accept.rejection import Rejection
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.orders import RejectedRegions
from visspec.loop.out_of_order import decode_wavefront
from visspec.loop.read_only import ReadOnlyNoise, ReadOnlyState
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.image_codes.families import family_of
from visspec.models.image_codes.target import ImageAR
from visspec.sampling import Uniform
from visspec.types import Draft, DrafterTraits, Request, Sampling, State, Tree


@pytest.fixture(autouse=True)
def _shared_trees_as_they_were():
    """What these drafters write into trees from `static`, which all share, must not reach other tests."""
    kept = [(tree, [x.clone() for x in (tree.parent, tree.depth, tree.ancestor)]) for tree in trees._origin]
    yield
    with torch.inference_mode():
        for tree, values in kept:
            for tensor, value in zip((tree.parent, tree.depth, tree.ancestor), values):
                tensor.copy_(value)
    trees.static.cache_clear()


NEW = 12
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 20, "seed": 4}


def tensors(value, depth=4) -> Iterator[torch.Tensor]:
    """All tensors that a plain walk over attributes, entries and items finds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item, depth - 1)
    elif depth and hasattr(value, "keys"):
        for key in value.keys():
            yield from tensors(value[key], depth - 1)
    elif depth and not isinstance(value, (str, int, float, frozenset, type(None))) and not callable(value):
        for name in dir(value):
            if not name.startswith("_"):
                with contextlib.suppress(Exception):
                    yield from tensors(getattr(value, name), depth - 1)


def set_all(value, name, wanted):
    setattr(value, name, wanted)


IN_STATE = {  # what is done to the state, one thing each; those that raise have been kept out
    "pending": lambda s: s.pending.fill_(3),
    "position": lambda s: s.position.add_(5),
    "rows": lambda s: s.rows.clear(),
    "append": lambda s: s.tokens[0].append(5),
    "assign": lambda s: s.tokens[0].__setitem__(0, 5),
    "remove": lambda s: s.tokens.__delitem__(0),
    "slices": lambda s: s.tokens[:][0].append(5),
    "walk": lambda s: next(iter(s.tokens)).append(5),
    "ids": lambda s: s.ids(0).fill_(3),
    "finished": lambda s: s.finished.add(0),
    "budget": lambda s: set_all(s, "budget", 1),
    "new pending": lambda s: set_all(s, "pending", torch.full((len(s.rows),), 3)),
    "drafting": lambda s: set_all(s, "drafting", 7),
    "prompt": lambda s: s.request.prompt.fill_(3),
    "limit": lambda s: set_all(s.request, "max_new_tokens", 2),
    "inputs": lambda s: [t.zero_() for t in tensors(s.request.inputs)],
    "no inputs": lambda s: s.request.inputs.clear(),
    "media": lambda s: [t.zero_() for t in tensors(s.request.media)],
    "grammar": lambda s: s.request.fixed.fill_(1),
    "sampling": lambda s: set_all(s.request.sampling, "temperature", 9.0),
    "processor": lambda s: set_all(s.request.sampling.processors[0], "bias", 100.0),
    "numbers": lambda s: s.noise.window(3).zero_(),
    "ahead": lambda s: s.noise.ahead[0].zero_(),
    "advance": lambda s: s.noise.advance([1] * len(s.rows)),
    "spent": lambda s: [torch.rand(5, generator=g) for g in s.noise.generators],
    "seeded": lambda s: [g.manual_seed(0) for g in s.noise.generators],
    "cache": lambda s: [t.zero_() for t in (*s.cache.slots.keys, *s.cache.slots.values)],
    "slots": lambda s: s.cache.slots.lengths.clear(),
    "trace": lambda s: s.trace.rounds.clear(),
    "laws": lambda s: s.distributions.clear(),
    "shared trees": lambda s: [t.zero_() for t in tensors(trees.empty_draft(s.pending).tree)],
    "everything": lambda s: [t.zero_() for t in tensors(s)],
}
IN_OBSERVE = {
    "logits": lambda d, s, v, o: s.logits.zero_(),
    "features": lambda d, s, v, o: s.features.zero_(),
    "verdict": lambda d, s, v, o: [t.fill_(2) for t in tensors(v)],
    "draft": lambda d, s, v, o: [t.fill_(1) for t in tensors(d)],
    "paths": lambda d, s, v, o: (o.path.clear(), o.tokens[0].append(3)),
    "one path": lambda d, s, v, o: o.path[0].clear(),
}


class Vandal(Double):
    """An oracle that, whenever it is called, does one of these things to what it was handed.

    kept: tensors of its own drafts and of those it was shown, which are written to in every later round.
    """

    def __init__(self, answers, wishes, rng=None, loud=False):
        self.answers, self.wishes, self.rng, self.loud = answers, wishes, rng or random.Random(0), loud
        self.kept, self.calls = [], 0

    def spoil(self, wishes, *handed):
        self.calls += 1
        for kept in self.kept:
            with contextlib.suppress(Exception):
                kept.fill_(1)
        names = [name for name in self.wishes if name in wishes]
        for name in names if len(names) <= 2 else self.rng.sample(names, 2):
            with contextlib.nullcontext() if self.loud else contextlib.suppress(Exception):
                wishes[name](*handed)

    def start(self, state, scores):
        self.spoil(IN_STATE, state)
        self.spoil({"logits": lambda s: [t.zero_() for t in tensors(s)]}, scores)
        self.spoil({"logits": lambda s: s.aux.clear()}, scores)

    def right(self, state, depth):
        ahead = [self.answers[r][len(state.tokens[r]) :][:depth] for r in state.rows]
        return chain_of(state.pending, torch.tensor([a + [-1] * (depth - len(a)) for a in ahead]))

    def propose(self, state, depth):
        draft = self.right(state, depth)
        self.spoil(IN_STATE, state)
        self.kept += tensors(draft)
        return draft

    def observe(self, state, draft, scores, verdict, outcome):
        self.spoil(IN_STATE, state)
        self.spoil(IN_OBSERVE, draft, scores, verdict, outcome)
        self.kept += tensors(draft)

    def select(self, state, keep):
        self.spoil(IN_STATE, state)
        keep.clear()


# --- drafts that lie --------------------------------------------------------------------------------------------------


class Slippery(torch.Tensor):
    """A tensor with manners of its own."""


def changed(tree, **parts):
    return Tree(**({f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)} | parts))


def shaken(tensor, rng, low, high):
    """A tensor with a few entries replaced."""
    found = tensor.clone()
    for _ in range(rng.randint(1, 3)):
        found.view(-1)[rng.randrange(found.numel())] = rng.randint(low, high)
    return found


def grown(draft, rng):
    """A tree of random shape, rows alike or not, with parts that need not agree; the oracle's tokens here and there."""
    rows, size = len(draft.value), rng.randint(2, 9)
    parents = [[-1, *(rng.randrange(n) for n in range(1, size))] for _ in range(rng.choice([1, rows]))]
    tree = trees.from_parents(torch.tensor(parents), draft.levels)
    tokens = torch.tensor([[rng.choice([*row, -1]) for _ in range(size)] for row in compact(draft).tolist()])
    for name, most in (("parent", size), ("depth", size), ("ancestor", 1)):
        if rng.random() < 0.5:
            tree = changed(tree, **{name: shaken(getattr(tree, name), rng, -1 if name == "parent" else 0, most)})
    return drafted(tokens, tree)


def distribution(draft, rng):
    q = torch.nn.functional.one_hot(draft.value, VOCAB).float()
    return rng.choice([q, q.long(), q.double(), q.half(), q + float("nan"), -q, q[:, :1], q.to("meta"), q.to_sparse()])


def empty(draft):
    none = draft.value[:, :0]
    return drafted(none, Tree(none, none, torch.zeros(len(none), 0, 0, dtype=torch.bool), 0, True))


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not this either")


def raising(draft, rng):
    raise rng.choice([Unspeakable(), RuntimeError("no"), MemoryError(), RecursionError(), StopIteration()])


LIES = {
    "empty": lambda d, rng: empty(d),
    "grown": grown,
    "levels": lambda d, rng: drafted(
        d.value, changed(d.tree, levels=rng.choice([-1, 2.5, True, 99, None, "3", torch.tensor(3), float("nan")]))
    ),
    "chain": lambda d, rng: drafted(d.value, changed(d.tree, chain=rng.choice(["no", False, None, torch.ones(2)]))),
    "types": lambda d, rng: drafted(d.value, changed(d.tree, depth=d.tree.depth.float())),
    "booleans": lambda d, rng: drafted(d.value, changed(d.tree, ancestor=d.tree.ancestor.long())),
    "elsewhere": lambda d, rng: drafted(d.value.to("meta"), d.tree),
    "tree elsewhere": lambda d, rng: drafted(d.value, changed(d.tree, parent=d.tree.parent.to("meta"))),
    "sparse": lambda d, rng: drafted(d.value.to_sparse(), d.tree),
    "subclass": lambda d, rng: drafted(d.value.as_subclass(Slippery), d.tree),
    "lists": lambda d, rng: drafted(d.value.tolist(), d.tree),
    "law": lambda d, rng: drafted(d.value, d.tree, distribution(d, rng)),
    "no draft": lambda d, rng: rng.choice([None, 3, "draft", Draft, d.value]),
    "raises": raising,
    "random": lambda d, rng: drafted(torch.randint(-9, 2 * VOCAB, d.value.shape), d.tree),
}


class Liar(Vandal):
    """A vandal whose drafts are lies, one in three as it should be."""

    def propose(self, state, depth):
        draft = super().propose(state, depth)
        if self.rng.random() < 0.3:
            return draft
        draft = LIES[self.rng.choice(list(LIES))](draft, self.rng)
        self.kept += tensors(draft)
        return draft


# --- ways to run ------------------------------------------------------------------------------------------------------


def text(name, shape, options, drafter, rule="exact"):
    inputs = prompt(name, shapes(name)[shape])
    return new_tokens(fast(name, drafter, acceptance=rule).generate(**inputs, **options), inputs)


@torch.inference_mode(False)
def janus():
    return family_of(tiny_images.janus(), None)


def image(rows, temperature, drafter, rule=None):
    """Codes of tiny images (B, T)."""
    family = janus()
    ids, attention = tiny_images.prompts(rows)
    made = family.from_ids(ids, attention, True)
    sampling, layout = Sampling(temperature=temperature, guidance=3.0), family.layout()
    request = Request(made, made.ids, layout.positions, sampling, grid=layout.grid, fixed=layout.fixed)
    if temperature:
        request.generators = [torch.Generator().manual_seed(r) for r in range(rows)]
    target = ImageAR(family, features=True)
    guarded = None if drafter is None else SafeDrafter(drafter, target.capabilities)
    return decode(target, guarded, rule or Exact(), request, FixedLength(5)).tokens


WAYS = {  # name: how it is run with a drafter
    "text, greedy": lambda drafter: text("llama", "one", GREEDY, drafter),
    "text, sampled": lambda drafter: text("llama", "ragged", SAMPLED, drafter),
    "text, ragged ends": lambda drafter: text("llama", "ragged", {**GREEDY, "eos_token_id": [7, 62, 66]}, drafter),
    "text, penalty": lambda drafter: text("llama", "ragged", {**SAMPLED, "repetition_penalty": 1.3}, drafter),
    "text, rejection": lambda drafter: text("llama", "ragged", GREEDY, drafter, "rejection"),
    "pictures in text": lambda drafter: text("llava", "ragged", GREEDY, drafter),
    "images, greedy": lambda drafter: image(3, 0.0, drafter),
    "images, drawn": lambda drafter: image(1, 1.0, drafter),
    "images, drawn by three": lambda drafter: image(3, 1.0, drafter),
    "images, rejection": lambda drafter: image(3, 0.0, drafter, Rejection()),
}


RICHEST = ("text, sampled", "images, drawn by three")  # rows, and numbers of the rule's and of their own


@pytest.fixture(scope="module")
def plain():
    return {way: run(None) for way, run in WAYS.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_drafter_that_writes_into_what_it_is_handed_changes_nothing(way, plain):
    """One wish at a time, in every call; what raises in the drafter is caught there, so that it goes on. All of them in
    two ways, every third in the others, which take turns.
    """
    wishes, turn = [*IN_STATE, *IN_OBSERVE], list(WAYS).index(way)
    for wish in wishes if way in RICHEST else wishes[turn % 3 :: 3]:
        vandal = Vandal(plain[way], [wish])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert WAYS[way](vandal) == plain[way], wish
        assert vandal.calls > 4, wish
        trees.static.cache_clear()


def test_what_cannot_be_done_is_a_fault_of_the_drafter(plain):
    """The same without catching: decoding goes on without the drafter."""
    for wish in ("append", "new pending", "drafting", "cache", "advance", "finished"):
        with pytest.warns(RuntimeWarning, match="drafter Vandal"):
            assert WAYS["text, sampled"](Vandal(plain["text, sampled"], [wish], loud=True)) == plain["text, sampled"]


@pytest.mark.parametrize("way", RICHEST)
@pytest.mark.parametrize("lie", LIES)
def test_lies_about_drafts_change_nothing(way, lie, plain):
    class One(Liar):
        def propose(self, state, depth):
            return LIES[lie](self.right(state, depth), self.rng)

    for seed in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert WAYS[way](One(plain[way], (), random.Random(seed))) == plain[way]


def test_a_node_that_denies_its_ancestors_is_not_the_root():
    """Node 1 claims to stand nowhere, node 2 below it to stand where the root does: nothing of them may be kept."""
    rows = 1
    ancestor = torch.eye(4, dtype=torch.bool)[None].clone()
    ancestor[0, 1, 1], ancestor[0, 3, 2] = False, True
    tree = Tree(torch.tensor([[-1, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1]]), ancestor, 3, False)

    class Denier(Double):
        def propose(self, state, depth):
            return drafted(torch.tensor([[5, 6, 7, 8]]), tree)

    target = ImageAR(janus())
    guarded = SafeDrafter(Denier(), target.capabilities)
    mended, sound = guarded._sound(tree, rows, torch.zeros(1, dtype=torch.long))
    assert sound.tolist() == [[True, False, False, False]]
    assert mended.parent.tolist() == [[-1, 0, 0, 0]] and mended.depth.tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("parent", [4, 5, 9, 2**40, -2, -(2**40)])
def test_a_parent_that_is_no_node_costs_its_own_node_alone(parent):
    like, true = torch.zeros(1, dtype=torch.long), trees.from_parents(torch.tensor([[-1, 0, 0, 1]]), 2)
    parents = true.parent.clone()
    parents[0, 2] = parent
    guarded = SafeDrafter(Double(), ImageAR(janus()).capabilities)
    mended, sound = guarded._sound(Tree(parents, true.depth, true.ancestor, 2, False), 1, like)
    assert sound.tolist() == [[True, True, False, True]]
    assert mended.parent.tolist() == [[-1, 0, 0, 1]] and mended.depth.tolist() == [[0, 1, 1, 2]]


def test_a_tree_for_a_rule_of_chains_is_a_fault():
    class Branching(Double):
        traits = DrafterTraits(levels=5, samples=True)

        def propose(self, state, depth):
            tokens = torch.full((len(state.rows), 3), 5)
            return drafted(tokens, trees.static((-1, 0, 0)), torch.nn.functional.one_hot(tokens, VOCAB).float())

    inputs = prompt("llama", shapes("llama")["ragged"])
    model = fast("llama", Branching(), acceptance="block")
    with pytest.warns(RuntimeWarning, match="expected a chain"):
        model.generate(**inputs, **SAMPLED)
    assert model.last_stats.faults == 1


def run_hostile(requests, plain):
    """Crashes and differences of so many requests with random drafters of random kinds, on random targets."""
    crashes, differences = [], []
    for number in range(requests):
        rng = random.Random(number)
        way = rng.choice(list(WAYS))
        kind = rng.choice([Vandal, Liar])
        drafter = kind(plain[way], [*IN_STATE, *IN_OBSERVE], rng, loud=rng.random() < 0.3)
        if rng.random() < 0.3:
            drafter.answers = [[rng.randrange(20) for _ in row] for row in plain[way]]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = WAYS[way](drafter)
        except Exception as error:
            crashes.append((number, way, repr(error)))
        else:
            if found != plain[way]:
                differences.append((number, way))
        trees.static.cache_clear()
    return crashes, differences


def test_hostile_drafters(plain):
    assert run_hostile(30, plain) == ([], [])


@pytest.mark.nightly
def test_five_hundred_hostile_requests(plain):
    assert run_hostile(500, plain) == ([], [])


def test_unguarded_writes_would_show(plain, monkeypatch):
    """Control: handed the state itself, drafters do change the output."""
    monkeypatch.setattr("visspec.loop.safe_drafter.ReadOnlyState", lambda state, target=None: state)
    monkeypatch.setattr(State, "of", lambda lent, state: True, raising=False)
    shown = 0
    for wish in ("pending", "position", "cache", "append", "advance", "spent", "seeded", "slots"):
        try:
            shown += WAYS["text, sampled"](Vandal(plain["text, sampled"], [wish])) != plain["text, sampled"]
        except Exception:
            shown += 1
    assert shown == 8


def test_copies_of_generators_yield_no_number_of_the_rule():
    """What is derived from a copy is known to the drafter; uniform numbers of the rule come from what follows it, every
    time.
    """
    own = torch.Generator().manual_seed(3)
    first = torch.randint(2**62, (), generator=own.clone_state())
    noise = Uniform([own], 4)
    following = own.clone_state()
    skipped = torch.randint(2**62, (), generator=following)
    peek = ReadOnlyNoise(noise)
    for _ in range(3):
        copied = peek.generators[0]
        assert torch.randint(2**62, (), generator=copied) == skipped != first
        assert torch.equal(own.get_state(), following.get_state())
    assert peek.samples and torch.equal(peek.window(2), noise.window(2))


def test_sketches_of_whole_images_write_nothing_either():
    """An order of islands judges a whole drafted image: its drafter sees the same view."""
    family = janus()
    ids, attention = tiny_images.prompts(2)
    target, rule = ImageAR(family), Local(tau=0.4, k=3)

    def run(sketch):
        made = family.from_ids(ids, attention, True)
        layout = family.layout()
        request = Request(made, made.ids, layout.positions, Sampling(temperature=1.0, guidance=3.0), grid=layout.grid)
        request.generators = [torch.Generator().manual_seed(r) for r in range(2)]
        drafter = type(
            "Sketcher", (Double,), {"sketch": staticmethod(sketch), "traits": DrafterTraits(whole_images=True)}
        )
        rule.bind(target.capabilities)
        plan = RejectedRegions().bind(rule, SafeDrafter(drafter(), target.capabilities))
        return decode_wavefront(target, request, plan.schedule).tokens

    def spoiling(state):
        for wish in IN_STATE.values():
            with contextlib.suppress(Exception):
                wish(state)
        return torch.zeros(2, 16, dtype=torch.long)

    assert run(spoiling) == run(lambda state: torch.zeros(2, 16, dtype=torch.long))


def test_a_view_reads_as_the_state():
    state = type("S", (), {})()
    state.tokens, state.rows, state.pending = [[1, 2, 3], [4]], [0, 1], torch.tensor([3, 4])
    state.memory, state.noise, state.lent = None, None, type("L", (), {"request": None, "noise": None})()
    view = ReadOnlyState(state)
    assert view.tokens == [[1, 2, 3], [4]] and len(view.tokens) == 2 and view.tokens[-1] == [4]
    assert view.tokens[0][1:] == [2, 3] and [9] + view.tokens[0] + [8] == [9, 1, 2, 3, 8]
    assert torch.tensor(view.tokens[0]).tolist() == [1, 2, 3] and [list(row) for row in view.tokens[:1]] == [[1, 2, 3]]
    assert view.rows == [0, 1] and 3 in view.tokens[0] and repr(view.tokens) == "[[1, 2, 3], [4]]"
    state.tokens[1].append(5)
    assert view.tokens[1] == [4, 5]
    view.pending.zero_()
    assert view.of(state) and state.pending.tolist() == [3, 4]
    state.pending = state.pending.clone()
    assert not view.of(state)


def test_what_a_drafter_reads_does_not_keep_the_state():
    """A request's cache is let go when its state is, without the garbage collector."""
    table = Table(4, 0)
    gc.disable()
    try:
        state = decoded(TableTarget(table), TableDrafter(table), Exact(), 2, 12)
        assert state.lent is not None
        gone = weakref.ref(state)
        del state
        assert gone() is None
    finally:
        gc.enable()
