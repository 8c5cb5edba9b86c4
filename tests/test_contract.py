"""The contract of every stock family: trees, commits, greedy identity, seeds. Equality is asserted in float32."""

import pytest
import torch

import visspec
from tests.doubles import NEW, Grower, Hostile, Oracle, TreeOracle, drafted, fast, forced, new_tokens, opened, stock
from tests.tiny import DISTINCT, FAMILIES, IMAGE, TWINS, VIDEO, VIDEOS, VISUAL, model_of, prompt, shapes, single_row
from visspec import tree as trees
from visspec.loop.decode import apply_verdict
from visspec.types import Verdict

BRANCHING = (-1, 0, 0, 1, 1, 3, 2, 5)
CASES = [(name, shape) for name in FAMILIES for shape in shapes(name)]


def covered(name, shape):
    """A row with one picture by one with several, long texts by short ones, and families that are as another one."""
    return (name in TWINS and shape != "ragged") or shape == ("one" if FAMILIES[name].visual else "several")


each_case = pytest.mark.parametrize(
    "name,shape", [pytest.param(n, s, marks=[pytest.mark.nightly] * covered(n, s)) for n, s in CASES]
)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # logits have a spread of 3 and more; measured differences are below 2e-5


def random_draft(state, parent=BRANCHING, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 88, (len(state.rows), len(parent)), generator=generator)
    tokens[:, 0] = state.pending
    return drafted(tokens, trees.static(parent))


def path_to(parent, node):
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path


def check_against_stock(name, rows, state, draft, scores, parent, leaves):
    """Every node on the way to `leaves` must score as stock decoding of that path alone."""
    for leaf in leaves:
        path = path_to(parent, leaf)
        gained = [state.tokens[b] + draft.value[b, path[1:]].tolist() for b in range(len(rows))]
        alone = forced(name, rows, gained)
        torch.testing.assert_close(scores.distribution.logits[:, path], alone[:, -len(path) :], **CLOSE)


def commit(target, state, draft, scores, paths):
    """Take these paths, whatever the target thinks of them, and a next token of our own."""
    width = max(map(len, paths))
    path = torch.tensor([p + [-1] * (width - len(p)) for p in paths])
    following = torch.arange(20, 20 + len(paths))
    outcome = apply_verdict(state, draft, scores, Verdict(path, torch.tensor([len(p) for p in paths]), following))
    target.commit(state, draft, outcome)


@each_case
@torch.inference_mode()
def test_tree_equals_paths_and_prefill(name, shape):
    """A branching tree scores like each of its paths alone, also after commits of paths that are no prefixes."""
    rows = shapes(name)[shape]
    target, state, _ = opened(name, rows)
    draft = random_draft(state)
    scores = target.verify(state, draft)
    check_against_stock(name, rows, state, draft, scores, BRANCHING, leaves=(4, 6, 7))
    paths = [[0, 1, 3, 5], [0, 2], [0, 2, 6]][: len(rows)] if len(rows) > 1 else [[0, 2, 6]]
    commit(target, state, draft, scores, paths)
    slots = state.cache.slots
    assert slots.lengths == [state.request.prompt.shape[1] + len(t) - 1 for t in state.tokens]
    short = min(map(len, state.tokens))
    if len(set(map(len, state.tokens))) > 1:  # rows of different length: compare each by itself
        draft = random_draft(state, seed=1)
        scores = target.verify(state, draft)
        for b, tokens in enumerate(state.tokens):
            gained = [tokens + draft.value[b, [1, 3, 5, 7]].tolist()] * len(rows)
            result = scores.distribution.logits[b, [0, 1, 3, 5, 7]]
            torch.testing.assert_close(result, forced(name, rows, gained)[b, -5:], **CLOSE)
        return
    draft = random_draft(state, seed=1)
    assert short == len(state.tokens[0])
    check_against_stock(name, rows, state, draft, target.verify(state, draft), BRANCHING, leaves=(4, 6, 7))


DEEP = (-1, 0, 0, *range(2, 13))  # deeper than the windows, and slots that are not depths


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.sliding])
@torch.inference_mode()
def test_windows_inside_a_draft(name):
    for shape in ("one", "even"):
        rows = shapes(name)[shape]
        target, state, _ = opened(name, rows)
        draft = random_draft(state, DEEP)
        check_against_stock(name, rows, state, draft, target.verify(state, draft), DEEP, leaves=(len(DEEP) - 1,))


DRAFTERS = {
    "none": lambda answers: None, "ngram": lambda answers: "ngram", "oracle": Oracle,
    "tree": lambda answers: TreeOracle(answers, wrong=0.4),
    "tree_per_row": lambda answers: TreeOracle(answers, wrong=0.4, per_row=True), "grown": Grower,
    "hostile": lambda answers: Hostile(),
}  # fmt: skip


@each_case
def test_greedy_equals_stock(name, shape):
    """Every draft gives generate's output; good drafts save passes. Three of seven drafters per case, in turn."""
    inputs = prompt(name, shapes(name)[shape])
    expected, first, kinds = stock(name, shape), 3 * CASES.index((name, shape)), list(DRAFTERS)
    for kind in (kinds[(first + i) % len(kinds)] for i in range(3)):
        model = fast(name, DRAFTERS[kind](expected))
        output = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert new_tokens(output, inputs) == expected, kind
        assert model.last_stats.faults == 0, kind
        if kind == "oracle":
            content = max(sum(token in (IMAGE, VIDEO) for token in row) for row in expected)  # never drafted
            assert model.last_stats.rounds <= (NEW - 1 + 5) // 6 + content, "an oracle must be accepted whole"
        if kind in ("tree", "tree_per_row", "grown"):
            assert model.last_stats.tau > 1.2, f"{kind}: trees must be accepted in part"


@pytest.mark.parametrize("name", DISTINCT)
def test_rows_do_not_depend_on_their_batch(name):
    """A row of a ragged batch decodes as it does alone, greedy and sampled, drafted and not."""
    rows = shapes(name)["ragged"]
    inputs = prompt(name, rows)
    sampling = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 14}
    expected = new_tokens(fast(name, None).generate(**inputs, **sampling, seed=[11, 12, 13]), inputs)
    assert expected != [row[:14] for row in stock(name, "ragged")]
    for drafter in ("ngram", TreeOracle(expected, wrong=0.3), Hostile()):
        assert new_tokens(fast(name, drafter).generate(**inputs, **sampling, seed=[11, 12, 13]), inputs) == expected
    for b in range(len(rows)):
        alone = single_row(name, rows, inputs, b)
        drafter = TreeOracle([expected[b]], wrong=0.3)
        assert new_tokens(fast(name, drafter).generate(**alone, **sampling, seed=[11 + b]), alone) == [expected[b]]


class Intruder(Oracle):
    """Runs another request on the same model between any two passes."""

    def __init__(self, answers, model, other):
        super().__init__(answers)
        self.model, self.other, self.visits = model, other, 0

    def propose(self, state, depth):
        self.visits += 1
        self.model.generate(**self.other, max_new_tokens=2, do_sample=False)
        return super().propose(state, min(depth, 2))


@pytest.mark.parametrize("name", [name for name in VISUAL if name not in TWINS])
def test_interleaved_requests(name):
    """M-RoPE families keep the newest request's delta on the module: ours must be the request's own."""
    inputs, other = prompt(name, shapes(name)["one"]), prompt(name, shapes(name)["several"], seed=5)
    intruder = Intruder(stock(name, "one"), model_of(name), other)
    model = fast(name, intruder)
    assert new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == stock(name, "one")
    assert intruder.visits >= 5 and model.last_stats.faults == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_5_vl", "gemma3", "paligemma"])
def test_eager_attention(name):
    model = FAMILIES[name].make()
    model.set_attn_implementation("eager")
    for shape in ("one", "ragged"):
        inputs = prompt(name, shapes(name)[shape])
        expected = new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
        quick = visspec.accelerate(model, TreeOracle(expected, wrong=0.4), adaptive=False)
        assert new_tokens(quick.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected


@pytest.mark.parametrize(("name", "shape", "pixels"), [
    *((name, "several", "pixel_values") for name in VISUAL),
    *((name, "video", "pixel_values_videos") for name in VIDEOS),
])  # fmt: skip
def test_pictures_reach_the_answer(name, shape, pixels):
    """Control of the fixtures: other pictures, another answer."""
    inputs = prompt(name, shapes(name)[shape])
    inputs[pixels] = prompt(name, shapes(name)[shape], seed=1)[pixels]
    output = model_of(name).generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(output, inputs) != stock(name, shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_vary(name):
    """Control of the fixtures: a model that repeats one token would hide most faults."""
    assert max(len(set(row)) for shape in ("several", "ragged") for row in stock(name, shape)) >= 8
