"""Faults of the drafter cost speed, never output; faults of the target are errors."""

import inspect
import re
import warnings
from dataclasses import replace

import pytest
import torch

import visspec
from tests import tiny_images
from tests.doubles import NEW, Double, Grower, Oracle, compact, drafted, fast, new_tokens, opened, stock
from tests.registry_cases import drawn, janus_pair
from tests.tables import Table, TableDrafter, TableTarget, decoded
from tests.tiny import IMAGE, VOCAB, llama, prompt, shapes
from tests.tiny_images import Words
from visspec import tree as trees
from visspec.accept.exact import Exact
from visspec.distributions import Categorical
from visspec.loop.safe_drafter import SafeDrafter
from visspec.types import Capabilities, DrafterTraits, Tree


class Faulty(Oracle):
    """An oracle whose `stage` goes wrong at its third call (start: at the first)."""

    def __init__(self, answers, stage, fault):
        super().__init__(answers)
        self.stage, self.fault, self.calls = stage, fault, 0

    def _maybe(self, stage):
        self.calls += stage == self.stage
        if stage == self.stage and self.calls == (1 if stage in ("start", "select") else 3):
            raise self.fault

    def start(self, state, scores):
        self._maybe("start")

    def propose(self, state, depth):
        self._maybe("propose")
        return super().propose(state, depth)

    def observe(self, *args):
        self._maybe("observe")

    def select(self, state, keep):
        self._maybe("select")


class Spoilt(Oracle):
    """An oracle whose drafts are spoilt by a function (draft, state) -> anything, in every second round."""

    def __init__(self, answers, spoil, samples=False):
        super().__init__(answers)
        self.spoil, self.calls = spoil, 0
        self.traits = DrafterTraits(levels=5, samples=samples)

    def propose(self, state, depth):
        draft = super().propose(state, depth)
        if self.traits.samples:
            q = torch.nn.functional.one_hot(draft.value, VOCAB).float()
            draft = replace(draft, q=Categorical(p=q))
        self.calls += 1
        return self.spoil(draft, state) if self.calls % 2 == 0 else draft


def with_tokens(draft, index, value):
    tokens = compact(draft).clone()
    tokens[:, index] = value
    return drafted(tokens, draft.tree, draft.q)


def with_tree(change):
    return lambda draft, state: drafted(draft.value[:, :6], change(draft.tree))


def with_q(draft, change):
    q = draft.q.p.clone()
    change(q)
    return replace(draft, q=Categorical(p=q))


def longer(draft, state):
    return trees.chain_draft(state.pending, torch.zeros(len(state.rows), draft.levels + 1, dtype=torch.long))


def wide(draft, state):
    tree = trees.static((-1, *[0] * 1500))
    return drafted(torch.zeros(len(state.rows), 1501, dtype=torch.long), tree)


def raw(tokens):
    return lambda draft, state: drafted(tokens(draft), draft.tree)


def check(model, inputs, expected, options, faults):
    """Same output, one warning for however many faults, all counted; the same again in the next request."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        output = model.generate(**inputs, **options)
    ours = [w for w in seen if issubclass(w.category, RuntimeWarning) and "drafter" in str(w.message)]
    assert new_tokens(output, inputs) == expected
    assert len(ours) == (1 if faults else 0), [str(w.message) for w in ours]
    assert (model.last_stats.faults > 0) == bool(faults)
    if faults == 1:
        assert model.last_stats.faults == 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert new_tokens(model.generate(**inputs, **options), inputs) == expected
    assert not [w for w in seen if "drafter" in str(w.message)], "the warning comes once"


ERRORS = {
    "error": RuntimeError("broken"), "memory": torch.OutOfMemoryError("CUDA out of memory"),
    "host memory": MemoryError(), "key": KeyError("x"), "assertion": AssertionError(),
}  # fmt: skip
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


STAGES = ["start", "propose", "observe", "select"]  # the last one is called where rows leave


@pytest.mark.parametrize("stage, error, shape", [
    *(("propose", error, "ragged") for error in ERRORS), *((stage, "error", "ragged") for stage in STAGES),
    *((stage, "memory", "one") for stage in STAGES[:3]),
])  # fmt: skip
def test_drafter_raises(stage, error, shape):
    inputs = prompt("llava", shapes("llava")[shape])
    expected = stock("llava", shape)
    options = GREEDY
    if stage == "select":
        options = {**GREEDY, "eos_token_id": expected[1][6]}
        expected = new_tokens(fast("llava", None).generate(**inputs, **options), inputs)
    model = fast("llava", Faulty(stock("llava", shape), stage, ERRORS[error]))
    check(model, inputs, expected, options, faults=1)
    if stage in ("propose", "observe"):
        assert model.drafter.calls >= 3
        assert model.last_stats.tau > 1, "the next request drafts again"


BAD_DRAFTS = {
    "nothing": lambda d, s: None, "a tensor": lambda d, s: d.value, "too deep": longer, "too wide": wide,
    "rows missing": lambda d, s: drafted(d.value[:-1], d.tree), "nodes missing": raw(lambda d: d.value[:, :-1]),
    "one dimension": raw(lambda d: d.value[0]), "float ids": raw(lambda d: d.value.float()),
    "int32 ids": raw(lambda d: d.value.int()), "bool ids": raw(lambda d: d.value.bool()),
    "no tokens": raw(lambda d: d.value[:, :0]), "no tree": lambda d, s: drafted(d.value, None),
    "tree of other rows": lambda d, s: drafted(d.value, trees.from_parents(d.tree.parent.expand(5, -1), d.levels)),
}  # fmt: skip
IMPOSSIBLE_TREES = {  # built by a wrong call or by hand
    "understated levels": with_tree(lambda t: trees.Tree(t.parent, t.depth, t.ancestor, 1, False)),
    "false depth": with_tree(lambda t: trees.Tree(t.parent, t.depth * 0, t.ancestor, t.levels, False)),
    "false ancestors": with_tree(lambda t: trees.Tree(t.parent, t.depth, t.ancestor | True, t.levels, False)),
    "no ancestors": with_tree(lambda t: trees.Tree(t.parent, t.depth, t.ancestor & False, t.levels, False)),
    "parent beyond": with_tree(lambda t: trees.Tree(t.parent + 90, t.depth, t.ancestor, t.levels, False)),
    "own parent": with_tree(lambda t: trees.Tree(t.parent + 1, t.depth, t.ancestor, t.levels, False)),
    "branches called a chain": with_tree(lambda t: replace(trees.static((-1, 0, 0, 1, 1, 2)), levels=5, chain=True)),
    "grown with too few levels": with_tree(lambda t: trees.from_parents(t.parent, 1)),
}
BAD_IDS = {
    "beyond": lambda d, s: with_tokens(d, 2, VOCAB),
    "far beyond": lambda d, s: with_tokens(d, 2, 2**40),
    "negative id": lambda d, s: with_tokens(d, 2, -7),
}


def test_image_ids_and_empty_drafts():
    inputs = prompt("llava", shapes("llava")["ragged"])
    for spoil in (
        lambda d, s: with_tokens(d, 2, IMAGE),
        lambda d, s: trees.empty_draft(s.pending),
        lambda d, s: with_tokens(d, slice(1, None), -1),
        lambda d, s: with_tokens(d, 0, 5),  # the pending token is ours to know
    ):
        answers = stock("llava", "ragged")
        check(fast("llava", Spoilt(answers, spoil)), inputs, answers, GREEDY, faults=0)


BAD_LAWS = {
    "nan": lambda d, s: with_q(d, lambda q: q[:, 2].fill_(float("nan"))),
    "inf": lambda d, s: with_q(d, lambda q: q[:, 2, 5].fill_(float("inf"))),
    "minus inf": lambda d, s: with_q(d, lambda q: q[:, 2, 5].fill_(float("-inf"))),
    "negative": lambda d, s: with_q(d, lambda q: (q[:, 2, 5].fill_(-0.5), q[:, 2, 6].fill_(0.5))),
    "sums to more": lambda d, s: with_q(d, lambda q: q[:, 2].mul_(1.5)),
    "sums to less": lambda d, s: with_q(d, lambda q: q[:, 2].mul_(0.9)),
    "zero": lambda d, s: with_q(d, lambda q: q[:, 2].zero_()),
    "zero at the token": lambda d, s: with_q(d, lambda q: q.copy_(q.roll(1, -1))),
    "wrong vocabulary": lambda d, s: replace(d, q=Categorical(p=torch.nn.functional.pad(d.q.p, (0, 4)))),
    "short vocabulary": lambda d, s: replace(d, q=Categorical(p=d.q.p[..., :-4])),
    "no nodes": lambda d, s: replace(d, q=Categorical(p=d.q.p[:, 0])),
}


SPOILT = BAD_DRAFTS | BAD_IDS | BAD_LAWS


@pytest.mark.parametrize("kind, shape", [
    *((kind, "ragged") for kind in SPOILT), *((kind, "one") for kind in ("too deep", "one dimension", "beyond", "nan")),
])  # fmt: skip
def test_spoilt_drafts_keep_output(kind, shape):
    """A draft is refused whole, or node by node; a law that can't be makes its node absent."""
    inputs, answers, laws = prompt("llava", shapes("llava")[shape]), stock("llava", shape), kind in BAD_LAWS
    model = fast("llava", Spoilt(answers, SPOILT[kind], laws), acceptance="rejection" if laws else "exact")
    check(model, inputs, answers, GREEDY, faults=1 if kind in BAD_DRAFTS else 2)
    if kind in BAD_IDS:
        assert model.last_stats.tau > 1.5, "good nodes are still used"


@pytest.mark.parametrize("kind, rows, temperature", [
    *((kind, 3, 1.0) for kind in (*BAD_IDS, "rows missing", "nothing", "float ids")), ("beyond", 3, 0.0),
    ("rows missing", 3, 0.0), ("negative id", 1, 1.0),
])  # fmt: skip
def test_spoilt_drafts_of_images(kind, rows, temperature):
    plain, _ = drawn(janus_pair(None, Exact()), list(range(rows)), temperature=temperature)
    setup = janus_pair(Spoilt(plain, SPOILT[kind]), Exact())
    with pytest.warns(RuntimeWarning, match="drafter Spoilt"):
        result, state = drawn(setup, list(range(rows)), temperature=temperature, faults=None)
    assert result == plain and state.trace.faults > 0


def test_tree_for_chain_rule_is_fault():
    class Branching(Double):
        def propose(self, state, depth):
            tree = trees.static((-1, 0, 0))
            return drafted(torch.full((len(state.rows), 3), 5), tree)

    guarded = SafeDrafter(Branching(), Capabilities(vocab=VOCAB), chains=True)
    _, state, scores = opened("llama", shapes("llama")["one"])
    guarded.start(state, scores)
    with pytest.warns(RuntimeWarning, match="expected a chain"):
        assert guarded.propose(state, 3).tree.size == 1
    assert state.trace.faults == 1 and not state.drafting


# --- for whoever writes a drafter -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES[:3])
def test_the_warning_names_the_line(stage):
    lines, first = inspect.getsourcelines(Faulty)
    line = first + next(n for n, text in enumerate(lines) if "raise self.fault" in text)
    with pytest.warns(RuntimeWarning, match=re.escape(f"{__file__}:{line};")):
        fast("llama", Faulty(stock("llama", "one"), stage, KeyError("x"))).generate(**prompt("llama", ["9"]), **GREEDY)
    line = inspect.getsourcelines(Spoilt.propose)[1]
    with pytest.warns(RuntimeWarning, match=re.escape(f"{__file__}:{line};")):
        fast("llama", Spoilt(stock("llama", "one"), SPOILT["int32 ids"])).generate(**prompt("llama", ["9"]), **GREEDY)


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_debug_raises(way, monkeypatch):
    if way == "environment":
        monkeypatch.setenv("VISSPEC_DEBUG", "1")
    options = {"debug": True} if way == "argument" else {}
    answers, inputs = stock("llava", "ragged"), prompt("llava", shapes("llava")["ragged"])
    spoilt = {kind: Spoilt(answers, spoil) for kind, spoil in (BAD_DRAFTS | BAD_IDS | IMPOSSIBLE_TREES).items()}
    for drafter in [Faulty(answers, stage, KeyError("x")) for stage in STAGES[:3]]:
        with pytest.raises(KeyError, match="x"):
            fast("llava", drafter, **options).generate(**inputs, **GREEDY)
    for kind, drafter in spoilt.items():
        with pytest.raises((ValueError, TypeError, AttributeError)):
            fast("llava", drafter, **options).generate(**inputs, **GREEDY)
            pytest.fail(kind)
    good = fast("llava", Grower(answers), **options)
    assert new_tokens(good.generate(**inputs, **GREEDY), inputs) == answers


def test_debug_of_a_pipeline():
    drafter = Faulty([[]], "propose", KeyError("x"))
    pipe = visspec.ImagePipeline(tiny_images.janus(), Words(), drafter=drafter, debug=True)
    with pytest.raises(KeyError, match="x"):
        pipe(["a b"], seed=3, output_type="latent")


def test_a_bad_law_takes_no_other_with_it():
    limits = Categorical.limits(Capabilities(vocab=4), "cpu")
    q = torch.full((2, 4, 4), 0.25)
    q[0, 1], q[0, 2, 3], q[1, 3, 0] = float("nan"), float("inf"), -0.5
    distribution, lawful = Categorical(p=q).sanitize(torch.zeros(2, 4, dtype=torch.long), limits)
    assert lawful.tolist() == [[True, False, False, True], [True, True, True, False]]
    assert torch.equal(distribution.p, torch.where(lawful[..., None], 0.25, 0.0).expand(2, 4, 4))


@pytest.mark.parametrize("error", [RuntimeError("target broke"), torch.OutOfMemoryError("target memory")])
@pytest.mark.parametrize("call", [1, 3], ids=["prefill", "verification"])
def test_target_faults_raise(error, call):
    model, calls = llama(), []

    def breaking(*_):
        calls.append(1)
        if len(calls) == call:
            raise error

    model.model.layers[1].register_forward_pre_hook(breaking)
    inputs = prompt("llama", ["9"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(error), match=str(error)):  # without the probe, whose passes would be counted too
            visspec.accelerate(model, Double(), probe=False).generate(**inputs, max_new_tokens=NEW, do_sample=False)


def test_processor_faults_raise():
    def broken(*args, **kwargs):
        raise ZeroDivisionError("theirs")

    lists = {name: [broken] for name in ("logits_processor", "stopping_criteria")}
    for name, own in (lists | {"prefix_allowed_tokens_fn": broken}).items():
        with pytest.raises(ZeroDivisionError, match="theirs"):
            fast("llama", "ngram").generate(**prompt("llama", ["9"]), **GREEDY, **{name: own})


def test_keyboard_interrupt_raised():
    inputs = prompt("llama", ["9"])
    with pytest.raises(KeyboardInterrupt):
        fast("llama", Faulty(stock("llama", "one"), "propose", KeyboardInterrupt())).generate(**inputs, **GREEDY)


class Seen(TableTarget):
    def __init__(self, table):
        super().__init__(table)
        self.drafts = []

    def verify(self, state, draft):
        self.drafts.append(draft)
        return super().verify(state, draft)


@pytest.mark.parametrize("banned", range(4))
def test_every_id_can_be_banned(banned):
    target = Seen(Table(4, 0))
    target.capabilities = Capabilities(vocab=4, never_drafted=frozenset({banned, 4, -1}))

    class Siblings(Double):
        def propose(self, state, depth):
            tokens = torch.arange(-1, 4).expand(len(state.rows), -1)
            return drafted(tokens, trees.static((-1, 0, 0, 0, 0)))

    state = decoded(target, Siblings(), Exact(), 2, 8)
    draft_lengths = [compact(draft)[:, 1:].unique(dim=0).tolist() for draft in target.drafts if draft.tree.size > 1]
    assert len(draft_lengths) > 1 and state.trace.faults == 0
    assert all(tokens == [[-1 if i == banned else i for i in range(4)]] for tokens in draft_lengths)


@pytest.mark.parametrize("rows", [1, 2])
def test_hand_made_chains(rows):
    class ByHand(TableDrafter):
        def propose(self, state, depth):
            draft = super().propose(state, depth)
            parts = (getattr(draft.tree, name).clone() for name in ("parent", "depth", "ancestor"))
            return drafted(draft.value, Tree(*parts, draft.levels, chain=True), draft.q)

    target = Seen(Table(4, 0))
    state = decoded(target, ByHand(target.table), Exact(), rows, 24)
    assert {word for row in state.trace.origin for word in row} == {"plain", "drafted", "bonus"}
    assert all(draft.tree.chain for draft in target.drafts)


@pytest.mark.parametrize("drafter", ["ngram", "context", "recycling"])
def test_pruned_head(drafter):
    """The head has fewer rows than the embedding, as that of Apertus 1.5."""
    model = llama(seed=7)
    head = torch.nn.Linear(model.config.hidden_size, 40, bias=False)
    head.weight.data = model.lm_head.weight.data[:40].clone()
    model.lm_head = head
    ids = torch.tensor([[1, *([50, 7, 60, 9, 70, 11] * 4), 50]])
    ids = torch.cat([ids, model.generate(ids, max_new_tokens=2, do_sample=False)[:, -1:], ids[:, 1:]], dim=1)
    quick = visspec.accelerate(model, drafter, adaptive=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = quick.generate(ids, max_new_tokens=12, do_sample=False)
    assert result.tolist() == model.generate(ids, max_new_tokens=12, do_sample=False).tolist()
    assert quick.last_stats.faults == 0
    assert quick.target.capabilities.prompt_ids > quick.target.capabilities.vocab == 40


class Reader(visspec.Drafter):
    """Reads the rows of a batch whose rows end at different times, by the numbers of `state.rows`."""

    traits = DrafterTraits(levels=2)

    def __init__(self):
        self.read = []

    def propose(self, state, depth):
        for row in state.rows:
            new = state.tokens[row]
            self.read.append((row, state.ids(row)[0].tolist()[-len(new) :] == new, state.room(row) > 0))
        return trees.chain_draft(state.pending, state.pending[:, None].repeat(1, depth))


def test_rows_of_a_state_have_one_numbering():
    """The numbers in `rows` are those that `ids`, `tokens` and `room` take, also when earlier rows have ended."""
    inputs = prompt("llama", ["9", "5 7 5", "3 1"])
    length, marked = inputs["input_ids"].shape[1], inputs["input_ids"][0, -1]

    def stop(ids, scores):
        return (ids[:, length - 1] == marked) & (ids.shape[1] >= length + 4)

    drafter = Reader()
    fast("llama", drafter, debug=True, adaptive=False).generate(**inputs, max_new_tokens=20, stopping_criteria=[stop])
    assert {row for row, *_ in drafter.read} == {0, 1, 2} and drafter.read[-1][0] != 0, "row 0 ends first"
    assert all(right and room for _, right, room in drafter.read)
