"""Any-order images: laws against one pass of the network, orders, drafts from the network itself."""

from __future__ import annotations

import copy
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch

import visspec
from tests import tiny_images
from tests.any_order import distributions, process
from tests.distributions import chi_square, output_law, total_variation, verdicts
from tests.doubles import raises_line
from tests.tiny import model_of
from visspec import ImagePipeline, registry
from visspec import tree as trees
from visspec.distributions import Categorical
from visspec.loop.draft_length import FixedLength
from visspec.loop.setup import build_setup
from visspec.loop.visits import HaltonOrder, SpreadOrder, halton, spread
from visspec.models.image_codes.family import family_of
from visspec.models.jacobi.drafter import Jacobi
from visspec.models.llamagen.network import LlamaGenConfig, RandAR
from visspec.models.randar.ahead import Ahead
from visspec.models.randar.target import RandARTarget
from visspec.types import Draft, DrafterTraits, Request, Sampling

SIDE, CODES = 4, 24
PLACES = SIDE * SIDE
ORDERS = {"raster": None, "halton": halton(SIDE, SIDE), "spread": spread(SIDE, SIDE)}
DRAFTERS = {"none": lambda: None, "ahead": lambda: Ahead(5), "jacobi": lambda: Jacobi(4)}


@functools.cache
@torch.inference_mode(False)
def network(condition="class", side=SIDE, codes=CODES, seed=0):
    more = {"prefix": 5, "caption_width": 12, "prefix_apart": False} if condition == "caption" else {"classes": 10}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        more |= {"condition": condition, "codes": codes, "kv_heads": 2, "intermediate": 48}
        model = RandAR(LlamaGenConfig(2, 4, 32, side, **more))
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 1.0 if "embed" in name else 1.3 * weight.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def captions(texts):
    words = [text.split() for text in texts]
    made = torch.stack([torch.randn(40, 5, 12, generator=torch.Generator().manual_seed(2))[len(w)] for w in words])
    return made, torch.tensor([[i < len(w) for i in range(5)] for w in words])


TEXTS = {"class": ["3", "0", "7"], "caption": ["a red cube", "blue", "a blue cube on grass"]}


@functools.cache
def family(condition="class"):
    return family_of(network(condition), captions if condition == "caption" else None)


def asked(condition, rows, sampling, order=None, seed=0):
    prompt = family(condition).prompt([TEXTS[condition][row] for row in rows], sampling.guidance != 1.0)
    request = Request(prompt, prompt.ids, PLACES, sampling, grid=(SIDE, SIDE), order=order)
    if not sampling.greedy:
        request.generators = [torch.Generator().manual_seed(seed + row) for row in rows]
    return request


def paired_of(made, drafter=None, rule="exact"):
    more = {"order": registry.order("raster"), "length": FixedLength}
    return build_setup(drafter, "", registry.rule(rule), made, lambda traits: made.make_target(traits, False), **more)


def draw(condition, rows, drafter=None, rule="exact", temperature=0.0, guidance=3.0, **options):
    """Codes of the images (B, T) in raster order, and the state."""
    request = asked(condition, rows, Sampling(temperature, guidance=guidance), **options)
    state = paired_of(family(condition), drafter, rule).decode(request)
    assert state.trace.faults == 0
    return torch.stack([state.output.values(row) for row in range(len(rows))]), state


@torch.no_grad()
def logits_after(condition, text, codes, places, guidance=3.0):
    """(n + 1, V) mixed logits of the last of the places after 0, 1, .. codes: one causal pass of the network alone."""
    model = network(condition)
    if condition == "class":
        prefix, seen = model.prefix(torch.tensor([int(text)]), guidance=True), None
    else:
        features, real = captions([text])
        count = int(real.sum())
        moved = torch.zeros(1, 5, 12)
        moved[0, 5 - count :] = features[0, :count]
        prefix, seen = model.prefix(moved, guidance=True), (torch.arange(5) >= 5 - count).repeat(2, 1)
    filled = torch.tensor([[*codes, 0]]).repeat(2, 1)
    given, without = distributions(model, prefix, filled, torch.tensor([places]).repeat(2, 1), seen)
    return without + guidance * (given - without)


@functools.cache
def reference(condition, row, name):
    """Greedy codes in raster order, every code by a pass of its own over all before it."""
    order, codes = ORDERS[name] or tuple(range(PLACES)), []
    while len(codes) < PLACES:
        places = order[: len(codes) + 1]
        codes.append(int(logits_after(condition, TEXTS[condition][row], codes, places)[-1].argmax()))
    return [code for _, code in sorted(zip(order, codes))]


# --- the network and the target ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("condition", TEXTS)
@pytest.mark.parametrize("kind", ["none", "ahead"])
def test_greedy_equals_network(name, condition, kind):
    codes, state = draw(condition, [0, 1, 2], DRAFTERS[kind](), order=ORDERS[name])
    assert codes.tolist() == [reference(condition, row, name) for row in range(3)]
    assert len({tuple(row) for row in codes.tolist()}) == 3  # the prompts count
    assert draw(condition, [1], DRAFTERS[kind](), order=ORDERS[name])[0].tolist() == codes[1:2].tolist()
    if kind == "ahead":
        assert any("drafted" in origin for origin in state.trace.origin)


def opened(condition, rows, order, ahead=0):
    target = RandARTarget(family(condition), ahead=ahead)
    request = asked(condition, rows, Sampling(guidance=3.0), order=order)
    state, scores = target.prefill(request)
    state.position = state.position + 1
    return target, state, scores


@torch.no_grad()
@pytest.mark.parametrize("condition", TEXTS)
def test_tree_laws_are_path_laws(condition):
    order, tree = ORDERS["halton"], trees.static((-1, 0, 0, 1, 1, 2, 3))
    tokens = torch.tensor([[3, 1, 2, 4, 7, 6, 9], [5, 8, 0, 2, 3, 4, 1]])
    target, state, first = opened(condition, [0, 1], order, ahead=3)
    for b in range(2):
        text = TEXTS[condition][b]
        for level in range(4):
            alone = logits_after(condition, text, [], [order[level]])[-1]
            result = first.distribution.logits[b, 0] if level == 0 else first.aux["ahead"][b, 0, level - 1]
            torch.testing.assert_close(result, alone, rtol=1e-4, atol=1e-4)
    for round_ in range(2):  # the second behind a committed path that is no chain
        scores = target.verify(state, Draft(tokens, tree))
        before = [[], []] if round_ == 0 else [[3, 2, 6], [5, 0, 4]]
        for b, (node, path) in itertools.product(range(2), enumerate(trees.paths(tree)[0].tolist())):
            codes = before[b] + [int(tokens[b, n]) for n in path if n >= 0]
            for level in range(4):
                places = [*order[: len(codes)], order[len(codes) + level]]
                alone = logits_after(condition, TEXTS[condition][b], codes, places)[-1]
                result = scores.distribution.logits[b, node] if level == 0 else scores.aux["ahead"][b, node, level - 1]
                torch.testing.assert_close(result, alone, rtol=1e-4, atol=2e-4)
        target.commit(state, Draft(tokens, tree), SimpleNamespace(path=[[0, 2, 5]] * 2))
        state.position = state.position + 3


def test_independent_codes_are_all_accepted():
    """16 codes are a prefill and rounds of 5 and 1."""
    model = copy.deepcopy(network())
    for layer in model.layers:
        layer.attention.wo.weight.zero_()
    made = family_of(model, None)
    prompt = made.prompt(["3"], False)
    request = Request(prompt, prompt.ids, PLACES, Sampling(1.0), grid=(SIDE, SIDE), order=ORDERS["halton"])
    request.generators = [torch.Generator().manual_seed(0)]
    state = paired_of(made, Ahead(5), "rejection").decode(request)
    assert [r.committed for r in state.trace.rounds] == [[6], [6], [3]]


# --- the law, by enumeration ------------------------------------------------------------------------------------------


class Net:
    """The laws that a target's own pass gives after every prefix of an order, V = 4, L = 4."""

    def __init__(self, order, levels):
        self.length, self.vocab = 4, 4
        made = family_of(network(side=2, codes=4), None)
        target = RandARTarget(made, ahead=levels)
        prompt = made.prompt(["3"] * 64, False)
        with torch.inference_mode():
            request = Request(prompt, prompt.ids, 4, Sampling(1.0), grid=(2, 2), order=order)
            state, first = target.prefill(request)
            state.position = state.position + 1
            every = torch.tensor(list(itertools.product(range(4), repeat=3)))
            scores = target.verify(state, Draft(every, trees.chain(2)))
        self.distributions = {(): first.distribution.logits[0, 0].double().softmax(-1)}
        self.later = {(): first.aux["ahead"][0, 0].double()}
        for row, codes in enumerate(every.tolist()):
            for n in range(3):
                self.distributions[tuple(codes[: n + 1])] = scores.distribution.logits[row, n].double().softmax(-1)
                self.later[tuple(codes[: n + 1])] = scores.aux["ahead"][row, n].double()

    def p(self, context):
        return self.distributions[tuple(context)]

    def ahead(self, context, levels):
        return self.later.get(tuple(context), torch.zeros(levels, 4, dtype=torch.float64))

    def plain(self):
        return output_law(self.p, [(1.0, ())], 4, 4)


@pytest.mark.parametrize("order", [None, (3, 0, 2, 1)])
@pytest.mark.parametrize("levels", [1, 3])
def test_law_of_whole_images(order, levels):
    net = Net(order, levels)
    distribution, passes = process(net, levels)
    assert abs(float(distribution.sum()) - 1) < 1e-12 and passes <= 4
    assert total_variation(distribution, net.plain()) < 1e-12


class Stale(Ahead):
    def observe(self, state, draft, scores, verdict, outcome):
        state.memory = scores.aux["ahead"][:, 0]


def test_other_laws_are_seen():
    """Drafts of an older law keep the law; misreported laws, no residual and codes behind a rejected one do not."""
    net = Net(None, 3)
    assert total_variation(process(net, 3, Stale(3))[0], net.plain()) < 1e-12
    for wrong in (misreported, whole_law_again, keeps_on):
        distribution = process(net, 3, keep=wrong)[0]
        assert abs(float(distribution.sum()) - 1) < 1e-12, wrong.__name__
        assert total_variation(distribution, net.plain()) > 1e-3, wrong.__name__


def misreported(p, committed, draft):
    """Drafts that are judged by flatter laws than those they were drawn from."""
    if draft.q is not None:
        flat = draft.q.p.sqrt()
        flat = Categorical(p=flat / flat.sum(-1, keepdim=True).clamp(min=1e-9))
        draft = Draft(draft.value, draft.tree, flat)
    return verdicts(p, committed, draft)


def whole_law_again(p, committed, draft):
    """No residual: after a rejection, a draw from the whole law."""
    result = {}
    for gained, share in verdicts(p, committed, draft):
        key = gained[:-1]
        result[key] = result.get(key, 0.0) + share
    return [((*key, y), share * float(p((*committed, *key))[y])) for key, share in result.items() for y in range(4)]


def keeps_on(p, committed, draft):
    """A code that is rejected is replaced, and what was drafted behind it is kept."""
    tokens = draft.value[0, 1:].tolist()
    for gained, share in verdicts(p, committed, draft):
        more = tokens[len(gained) :] if len(gained) <= len(tokens) else []
        yield (*gained, *more), share


@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_enumerated_law_of_images(rule):
    made, rows = family_of(network(side=2, codes=4), None), 2500
    prompt = made.prompt(["3"] * rows, False)
    request = Request(prompt, prompt.ids, 4, Sampling(1.0), grid=(2, 2), order=(3, 0, 2, 1))
    request.generators = [torch.Generator().manual_seed(row) for row in range(rows)]
    tokens = torch.tensor(paired_of(made, Ahead(3), rule).decode(request).tokens)
    counts = torch.bincount(tokens @ torch.tensor([64, 16, 4, 1]), minlength=256)
    distribution = Net((3, 0, 2, 1), 1).plain()
    assert chi_square(counts, distribution) > 1e-3
    assert chi_square(counts, distribution.transpose(1, 2).contiguous()) < 1e-6


# --- orders -----------------------------------------------------------------------------------------------------------


def distances(order, columns):
    at = torch.tensor([divmod(place, columns) for place in order]).float()
    return [float((at[n] - at[:n]).norm(dim=1).min()) for n in range(1, len(at))]


@pytest.mark.parametrize("rows,columns", [(1, 1), (4, 4), (3, 7), (12, 12)])
def test_orders_are_permutations_that_spread(rows, columns):
    for order in (SpreadOrder(), HaltonOrder()):
        assert sorted(order.places(rows, columns)) == list(range(rows * columns))
    far = distances(spread(rows, columns), columns)
    assert far == sorted(far, reverse=True)
    if rows > 4:
        count = rows * columns // 8
        assert min(far[:count]) >= 2
        assert sum(distances(halton(rows, columns), columns)[:count]) > 1.5 * count
        assert halton(8, 9)[:4] == (4 * 9 + 3, 2 * 9 + 6, 6 * 9 + 1, 1 * 9 + 4)  # 1/2 1/3, 1/4 2/3, 3/4 1/9, 1/8 4/9


def test_any_order_refusals():
    elsewhere = "drafts for any-order models, expected one for raster order, or text"
    for words, call in (
        (elsewhere, lambda: ImagePipeline(tiny_images.janus(), None).setup("ahead", "exact")),
        ("drafts for any-order models", lambda: visspec.accelerate(model_of("llava"), "ahead")),
        ("reads hidden states", lambda: family().make_target(DrafterTraits(feature_layers=(1,)), False)),
        ("compile: got True", lambda: family().make_target(DrafterTraits(), True)),
        ("levels: got 0, expected 1..64", lambda: Ahead(0)), ("levels: got 65, expected 1..64", lambda: Ahead(65)),
    ):  # fmt: skip
        with raises_line(words):
            call()
