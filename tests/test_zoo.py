"""The contract of every row of the zoo's tables, each on a tiny configuration: a row without one fails here."""

import pytest
import torch

import visspec
from tests import test_any_order, test_assistants, test_continuous_painting, test_mar_target, test_scales, tiny_images
from tests.doubles import new_tokens, stock
from tests.test_image_targets import CASES, draw, made
from tests.tiny import model_of, prompt, shapes, single_row
from visspec.accept.coupled import Coupled
from visspec.accept.exact import deepest
from visspec.accept.graphed_rule import GraphedRule
from visspec.accept.rejection import Rejection
from visspec.api import presets, zoo
from visspec.api.queueing import RequestBuilder
from visspec.distributions import Categorical, categorical
from visspec.loop.decode import advance, retire, select, start
from visspec.loop.setup import build_setup, check
from visspec.loop.stream import join
from visspec.models.block.diffusion_trained import DiffusionDrafter
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.layer_skip import LayerSkip
from visspec.models.decoder.small_model import SmallModel
from visspec.models.distilled.drafter import DistilledDrafter
from visspec.models.eagle.drafter import FeatureDrafter
from visspec.models.eagle.head_drafter import EagleDrafter
from visspec.models.eagle.image_drafter import ImageFeatureDrafter
from visspec.models.families import FAMILIES
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.models.lookup.recycling import Recycling
from visspec.models.lookup.suffix import SuffixDrafter
from visspec.models.lowres.drafter import LowRes
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.target import MARImages, MARTarget
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.target import VARImages, VARTarget
from visspec.tree import roots
from visspec.types import Acceptance, Drafter, Order, Request, RuleTraits, Sampling, Verdict

ROWS = [0, 1, 2]
TEXT = {  # that text knows as well
    "none", "ngram", "eagle", "eagle-head", "block-head", "jacobi", "suffix", "recycling", "layers",
    "diffusion-lm",
}  # fmt: skip
TEXT_ALONE = {"eagle", "eagle-head", "block-head", "diffusion-lm", "layers"}
DRAFTERS = {  # of the tiny image model, from options
    "none": lambda **options: None,
    "ngram": lambda **options: zoo.load(zoo.DRAFTERS["ngram"][0])(**options),
    "suffix": lambda **options: SuffixDrafter(**options),
    "recycling": lambda **options: Recycling(**options),
    "layers": lambda **options: LayerSkip(**options),
    "jacobi": lambda **options: zoo.load(zoo.DRAFTERS["jacobi"][0])(**{**options, "window": 5}),
    "lowres": lambda **options: LowRes(Janus(tiny_images.sibling(), None), upsample="latent"),
    "eagle": lambda **options: FeatureDrafter.for_model(model_of("llava"), image_latents=1),
    "eagle-head": lambda **options: EagleDrafter.for_model(model_of("llava"), images="latents", image_latents=1),
    "block-head": lambda **options: BlockDrafter.for_model(model_of("llava"), layers=1, block=4, markov=3),
    "diffusion-lm": lambda **options: DiffusionDrafter.for_model(model_of("llava"), layers=1, block=4),
    "image-eagle": lambda **options: ImageFeatureDrafter(
        ImageFeatureDrafter.for_model(made("janus").family, levels=4).head, made("janus").family, **options
    ),
    "distilled": lambda **options: DistilledDrafter(
        DistilledDrafter.for_model(made("janus").family, layers=1).head, made("janus").family, **options
    ),
}
# tests of their own have the drafters of vectors and of scales with their rules, a checkpoint's heads, and any order
ELSEWHERE = {"continuous", "mar", "mtp", "ahead", "neighbours", "var"}
TOKENS_ALONE = {"distilled", "diffusion-lm"}  # trained, and read nothing of the target's passes
ANY_ORDER = {"spread", "halton"}  # orders of `test_any_order`
CODE_RULES = [
    name for name, (reference, _) in zoo.ACCEPTANCE.items() if zoo.load(reference).traits.distribution is Categorical
]
RULES = {  # options that a codebook of 24 codes has room for
    "lantern": "lantern:k=5,delta=0.3", "lantern_plus": "lantern_plus:k=5,lam=2", "local": "local:tau=0.02,k=3",
}  # fmt: skip
SMALL = {"k=100": "k=5", "k=20": "k=5", "k=10": "k=5", "k=8": "k=3"}  # a preset's neighbours, as far as codes reach


def tiny_drafter(spec):
    """The drafter of a zoo name, tiny; a shipped one is a fresh network of its kind."""
    name, options = zoo.parse(spec or "none")
    return DRAFTERS[zoo.SHIPPED[name][0] if name in zoo.SHIPPED else name](**options)


def janus_pair(drafter, rule, order=None):
    """A setup whose depth does not depend on clocks."""
    family = made("janus").family

    def make_target(traits):
        return ImageAR(family, features=bool(traits.feature_layers))

    return build_setup(drafter, "", rule, family, make_target, order=order, adaptive=False)


def drawn(setup, rows, seed=0, temperature=1.0):
    """Tokens and state of a batch under a setup."""
    case = made("janus")
    made_prompt = case.prompt(rows)
    request = Request(
        made_prompt, made_prompt.ids, case.layout.positions, Sampling(temperature, guidance=case.guidance),
        grid=case.layout.grid,
    )  # fmt: skip
    request.generators = [torch.Generator().manual_seed(seed + r) for r in rows] if temperature else None
    state = setup.decode(request)
    assert state.trace.faults == 0
    return state.tokens, state


# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables_hold_what_they_say_and_every_row_has_a_tiny_one():
    assert set(DRAFTERS) == set(zoo.DRAFTERS) - ELSEWHERE and set(zoo.DRAFTERS) - {"none"} <= set(BATCHES)
    for name, (reference, what) in zoo.DRAFTERS.items():
        assert what and (reference is None or issubclass(zoo.load(reference), Drafter)), name
    for name, (reference, what) in zoo.ACCEPTANCE.items():
        assert what and issubclass(zoo.load(reference), Acceptance), name
    for name, (reference, what) in zoo.ORDERS.items():
        assert what and issubclass(zoo.load(reference), Order), name
    for name, (kind, folder, target, what) in zoo.SHIPPED.items():
        assert what and kind in zoo.DRAFTERS and (zoo.CHECKPOINTS / folder / "config.json").is_file(), name
        assert (zoo.CHECKPOINTS / target / "config.json").is_file(), name
    assert not set(zoo.DRAFTERS) & (set(zoo.SHIPPED) | set(zoo.ORDERS))
    assert {kind for kind, *_ in zoo.SHIPPED.values()} <= set(zoo.KINDS.values()) <= set(zoo.DRAFTERS)
    families = {type(made(name).family) for name in CASES}
    listed = {zoo.load(reference) for reference in FAMILIES.values()}
    # tests of their own have those of vectors (`test_continuous_painting`, `test_continuous_families`), of scales
    # (`test_scales`) and of any order (`test_any_order`)
    codes = {family for family in listed if family.draws == "codes"}
    assert codes == families, "an image family without a tiny model"


# --- drafters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(zoo.DRAFTERS) & TEXT))
def test_a_drafter_leaves_the_text_as_it_is(name):
    for shape in ("one", "ragged"):
        inputs = prompt("llava", shapes("llava")[shape])
        fast = visspec.accelerate(model_of("llava"), tiny_drafter(name), adaptive=False)
        output = fast.generate(**inputs, max_new_tokens=16, do_sample=False)
        assert new_tokens(output, inputs) == [row[:16] for row in stock("llava", shape)]
        assert fast.last_stats.faults == 0


@pytest.mark.parametrize("name", sorted(set(zoo.DRAFTERS) - TEXT_ALONE - ELSEWHERE))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_leaves_the_image_as_it_is(name, temperature):
    """Greedy and drawn, in a batch and alone."""
    expected, _ = draw(made("janus"), ROWS, temperature=temperature)
    setup = janus_pair(tiny_drafter(name), zoo.acceptance("exact"))
    assert drawn(setup, ROWS, temperature=temperature)[0] == expected
    assert drawn(setup, [1], seed=0, temperature=temperature)[0] == expected[1:2]


@pytest.mark.parametrize("name", sorted(set(zoo.DRAFTERS) - ELSEWHERE))
def test_traits_are_what_drafts_show(name):
    drafter = tiny_drafter(name)
    if drafter is None:
        return
    assert isinstance(drafter, Drafter) and drafter.traits.levels >= 1
    trained = set(zoo.KINDS.values()) - TOKENS_ALONE
    assert (drafter.traits.feature_layers != ()) == (name in trained)
    assert drafter.traits.whole_images == (type(drafter).sketch is not Drafter.sketch)


# --- rows of a batch --------------------------------------------------------------------------------------------------

GROUPS = ([0, 1, 2], [3, 4], [5])  # rows of text that are prefilled together; the last one has no picture
PARTS = ["3 i 4 i 9", "6 i 5", "12 i 2", "5 i 2 i 3", "2 i 6", "15"]
WORDS = ["square", "ring and a bar", "star"]


class Some(Rejection):
    """Keeps as many levels as the pending code says, whatever is drafted, and goes on with one of few codes."""

    traits = RuleTraits(judges_draws=True)

    def __call__(self, draft, scores, noise):
        parent, real = draft.tree.parent, torch.ones_like(draft.value, dtype=bool) if draft.real is None else draft.real
        later = ((parent[..., None] == parent[:, None]) & real[:, None]).tril(-1).any(dim=-1)
        kept = real & ~later & (draft.tree.depth <= draft.value[:, :1] % 3)
        return deepest(
            draft.tree, kept | roots(draft.tree), 5 + categorical(scores.distribution).logits[..., 5:11].argmax(-1)
        )


class SomeVectors(Coupled):
    def __call__(self, draft, scores, noise):
        if draft.tree.size == 1:
            return super().__call__(draft, scores, noise)
        last_B1 = (draft.value[:, 0, :1] > 0).long()
        index = torch.arange(draft.tree.size)
        return Verdict(
            torch.where(index <= last_B1, index, -1),
            last_B1[:, 0] + 1,
            draft.value[range(len(last_B1)), last_B1[:, 0] + 1],
        )


def stirred(drafter):
    """With weights that are zero in a fresh network moved, so that all it reads counts."""
    if (head := getattr(drafter, "head", None)) is not None:
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in head.parameters():
                weight.add_(0.2 * torch.randn_like(weight))
        if hasattr(drafter, "refresh"):
            drafter.refresh()
    return drafter


def texts(model, drafter, name="llava", parts=PARTS):
    """A setup of a text drafter, and the request of a group of rows."""
    fast = visspec.accelerate(model, stirred(drafter), acceptance=Some(), adaptive=False, levels=3)
    builder = RequestBuilder(model, fast.setup, {"do_sample": True, "top_k": 0, "max_new_tokens": 60})
    inputs = prompt(name, parts)
    few = (inputs["input_ids"] >= 5) & (inputs["input_ids"] < 88)
    inputs["input_ids"] = torch.where(few, 5 + inputs["input_ids"] % 6, inputs["input_ids"])

    def asked(rows):
        each = [builder.request(row, single_row(name, parts, inputs, row) | {"seed": row}) for row in rows]
        request = builder.together(each)
        request.each, request.sampling = each, each[0].sampling
        request.generators = [one.generators[0].clone_state() for one in each]
        return request

    return fast.setup, asked


def pictures(drafter, asked, family=None, rule=None, target=None, levels=3):
    """A setup of an image drafter, and the request of some rows."""
    make = (lambda _: target) if target else lambda traits: family.made(traits, False)
    rule = rule or Some()
    return build_setup(
        drafter, "", rule, family or target.family, make, levels=levels, adaptive=False, order=zoo.order("raster")
    ), asked


def of_codes(drafter):
    case, family = made("janus"), made("janus").family

    def asked(rows):
        found, sampling = case.prompt(rows), Sampling(1.0, guidance=case.guidance)
        generators = [torch.Generator().manual_seed(row) for row in rows]
        places = case.layout.positions
        return Request(found, found.ids, places, sampling, grid=case.layout.grid, generators=generators)

    return pictures(stirred(drafter), asked, family)


def of_any_order(drafter, order=None):
    return pictures(
        drafter, lambda rows: test_any_order.asked("caption", rows, Sampling(1.0, guidance=3.0), order),
        test_any_order.family("caption"),
    )  # fmt: skip


def of_vectors():
    model = test_continuous_painting.fresh("painter", test_continuous_painting.SMALL)
    pipe = visspec.ImagePipeline(model, test_continuous_painting.continuous_card.build_processor())

    def asked(rows):
        found = pipe.family.prompt([WORDS[row] for row in rows], True)
        generators = [torch.Generator().manual_seed(row) for row in rows]
        return Request(found, found.ids, 64, Sampling(1.0, guidance=2.0), generators=generators)

    drafter = test_continuous_painting.drafter(test_continuous_painting.fresh("drafter", feature=16), pipe)
    return pictures(drafter, asked, pipe.family, SomeVectors())


def of_mar():
    images, near = (MARImages(test_mar_target.network(0, n), plan=test_mar_target.PLAN) for n in (0.08, 0.079))
    single = {row: test_mar_target.generators(3)[row] for row in range(3)}

    def asked(rows):
        found = test_mar_target.request([(1, 4, 0)[row] for row in rows], Sampling(1.0, guidance=2.0))
        found.generators = [single[row].clone_state() for row in rows]
        return found

    return pictures(SmallMAR(near), asked, rule=SomeVectors(), target=MARTarget(images), levels=2)


def of_scales():
    model = test_scales.network(0)
    target = VARTarget(VARImages(model, codec=test_scales.vae()))

    def asked(rows):
        return test_scales.request([(1, 4, 0)[row] for row in rows], Sampling(0.0, guidance=2.0))

    return pictures(
        SmallVAR(test_scales.moved(model, 0.01)), asked, rule=zoo.acceptance("scales"), target=target, levels=2
    )


def of_pair(name):
    target, drafter = test_assistants.pair_of(name)
    return texts(target, test_assistants.made(name, target, drafter), "llama", ["13", "8", "15", "12", "9", "6"])


BATCHES = {
    **{name: lambda name=name: of_codes(tiny_drafter(name)) for name in DRAFTERS.keys() - TEXT - {"none"}},
    **{name: lambda name=name: texts(model_of("llava"), tiny_drafter(name)) for name in TEXT - {"none", "jacobi"}},
    "layers": lambda: texts(model_of("llava"), tiny_drafter("layers:exit=1")),
    "block-head": lambda: texts(
        model_of("qwen2_5_vl"), BlockDrafter.for_model(model_of("qwen2_5_vl"), layers=1, block=4, markov=3),
        "qwen2_5_vl",
    ),
    "image-eagle:tree=static": lambda: of_codes(tiny_drafter("image-eagle:tree=static,shape=3-3-3")),
    "jacobi": lambda: of_codes(tiny_drafter("jacobi:redraw=maximal,branch=2")),
    "jacobi:redraw=gumbel": lambda: of_codes(tiny_drafter("jacobi:redraw=gumbel")),
    "ahead": lambda: of_any_order(test_any_order.Ahead(3), test_any_order.ORDERS["halton"]),
    "neighbours": lambda: of_any_order(test_any_order.Neighbours(3)),
    "continuous": of_vectors, "mar": of_mar, "var": of_scales, "mtp": lambda: of_pair("mtp"),
    "a block model": lambda: of_pair("dflash"), "a shared cache": lambda: of_pair("gemma4"),
    "a small model": lambda: texts(model_of("llava"), SmallModel(model_of("qwen2"), model_of("llava"))),
}  # fmt: skip


def opened(setup, asked, rows, seen):
    """The state of some rows after their prefill; what is drafted for a row goes to its list in `seen`."""
    state, drafter = start(setup.target, setup.drafter, setup.rule, asked(rows)), setup.drafter
    who = dict(enumerate(rows))

    def watched(now, depth):
        draft = type(drafter).propose(drafter, now, depth)
        if now is state:
            shape = len(now.rows), draft.tree.size
            real = torch.ones(shape, dtype=bool) if draft.real is None else draft.real
            q = draft.q.p if isinstance(draft.q, Categorical) else torch.zeros(shape)
            for row, there, *drafted in zip(now.rows, real, draft.value, draft.tree.parent.expand(shape), q):
                seen.setdefault(who[row], []).append([part[there] for part in drafted])
        return draft

    drafter.propose = watched
    return state, who


@pytest.mark.parametrize("name", sorted(BATCHES))
@torch.inference_mode()
def test_what_is_drafted_for_a_row_in_a_batch_is_what_is_drafted_for_it_alone(name):
    """Behind rows that have left and been joined, exact rules hide other rows' keys and laws: only drafts show them."""
    setup, asked = BATCHES[name]()
    decoded = setup.target, setup.drafter, setup.rule, setup.length_policy
    together: dict[int, list] = {}
    others = [start(*decoded[:3], asked(rows)) for rows in GROUPS[1:]] if setup.drafter.traits.joins else []
    state, who = opened(setup, asked, GROUPS[0], together)

    def rounds(count):
        for _ in range(count):
            advance(state, *decoded)

    rounds(0 if name == "var" else 2)  # images of few scales are done after that
    select(state, *decoded[:2], [2, 1])
    rounds(1)
    for other, take, place in zip([*others[:1], *others], [1, 0, 0], [0, 3, 4]):
        join(state, *decoded[:2], other, [take], [place])
        who[place] = {0: 4, 3: 3, 4: 5}[place]
        rounds(1)
    if others:
        rounds(1)
        select(state, *decoded[:2], [4, 1, 2])
        rounds(2)
    assert state.trace.faults == 0 and len({n for r in state.trace.rounds for n in r.committed}) > 1
    assert any(len(value) > 1 for drafts in together.values() for value, *_ in drafts)
    for row, drafts in together.items():
        alone: dict[int, list] = {}
        single, _ = opened(setup, asked, [row], alone)
        for _ in drafts:
            advance(single, *decoded)
            retire(single, *decoded[:2])
        for found, wanted in zip(drafts, alone[row], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODE_RULES)
def test_a_rule_is_what_its_traits_say(name):
    """Exact rules measure no drift, the others do; a row does not depend on its batch; recordings change nothing."""
    text = RULES.get(name, name)
    rule = zoo.acceptance(text)
    spec = "jacobi:redraw=maximal" if rule.traits.judges_draws else "jacobi"
    tokens, state = drawn(janus_pair(tiny_drafter(spec), rule), ROWS)
    assert ("drift" in state.meters) == (rule.traits.guarantee == "approximate")
    assert drawn(janus_pair(tiny_drafter(spec), zoo.acceptance(text)), [2])[0] == tokens[2:]
    captured = GraphedRule(zoo.acceptance(text))
    setup = janus_pair(tiny_drafter(spec), captured)
    assert captured.traits == rule.traits and type(captured.inner) is type(rule)
    assert drawn(setup, ROWS)[0] == tokens


@pytest.mark.parametrize("name", CODE_RULES)
def test_a_rule_takes_the_drafts_that_its_traits_say(name):
    rule, target = zoo.acceptance(RULES.get(name, name)), ImageAR(made("janus").family)
    branching, sampled = (tiny_drafter("jacobi:redraw=maximal,branch=2"), tiny_drafter("jacobi:redraw=maximal"))
    for drafter, refused in (
        (branching, rule.traits.chains_only or not rule.traits.judges_draws),
        (sampled, not rule.traits.judges_draws),
        (tiny_drafter("jacobi"), False),
    ):
        if refused:
            with pytest.raises(ValueError, match=r"^drafter: .*expected"):
                check(drafter, rule, target)
        else:
            check(drafter, rule, target)


# --- orders and presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ANY_ORDER))
def test_an_order_of_places_is_for_any_order_models(name):
    with pytest.raises(ValueError, match=r"order: got .*only any-order models draw in another"):
        janus_pair(None, zoo.acceptance("exact"), zoo.order(name))


@pytest.mark.parametrize("name", sorted(zoo.ORDERS.keys() - ANY_ORDER))
def test_an_order_decides_every_place_and_knows_no_batch(name):
    text = {"zipar": "zipar:window=2"}.get(name, name)
    drafts, rule = {"islands": ("lowres", RULES["local"])}.get(name, ("none", "exact"))
    tokens, alone = (
        drawn(janus_pair(tiny_drafter(drafts), zoo.acceptance(rule), zoo.order(text)), rows)[0] for rows in (ROWS, [1])
    )
    assert [len(row) for row in tokens] == [made("janus").layout.positions] * 3 and alone == tokens[1:2]
    assert zoo.order(text).raster == (tokens == draw(made("janus"), ROWS, temperature=1.0)[0])


@pytest.mark.parametrize("name", presets.CODES)
def test_a_preset_draws(name):
    preset = zoo.preset(name)
    text = preset.acceptance
    for large, small in SMALL.items():
        text = text.replace(large, small)
    rule = zoo.acceptance(text)
    setup = janus_pair(tiny_drafter(preset.drafter), rule, zoo.order(preset.order))
    tokens, state = drawn(setup, ROWS)
    assert [len(row) for row in tokens] == [made("janus").layout.positions] * 3
    assert (setup.guarantee == "approximate") == ("drift" in state.meters)
    again = janus_pair(tiny_drafter(preset.drafter), zoo.acceptance(text), zoo.order(preset.order))
    assert drawn(again, ROWS)[0] == tokens
    if setup.promises_tokens(False):
        assert tokens == draw(made("janus"), ROWS, temperature=1.0)[0]
