"""The contract of drafters, over all kinds and forms: tokens of plain decoding, and rows that know no batch."""

from functools import partial

import pytest
import torch

import visspec
from tests import (
    test_any_order,
    test_assistants,
    test_block_heads,
    test_eagle,
    test_eagle_heads,
    test_mar_target,
    test_scales,
)
from tests.image_cases import made
from tests.registry_cases import DRAFTERS, ELSEWHERE, ROWS, TEXT, TEXT_ALONE, drawn, janus_pair, tiny_drafter
from tests.tiny import model_of, prompt, shapes, single_row
from visspec import registry
from visspec.accept.coupled import Coupled
from visspec.accept.exact import deepest
from visspec.accept.rejection import Rejection
from visspec.api.text.queueing import RequestBuilder
from visspec.distributions import Categorical, categorical
from visspec.loop.decode import advance, retire, select, start
from visspec.loop.draft_length import FixedLength
from visspec.loop.setup import build_setup
from visspec.loop.stream import join
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.small_model import SmallModel
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.target import MARImages, MARTarget
from visspec.models.scales.target import ScaleTarget
from visspec.models.var.drafter import SmallVAR
from visspec.models.var.target import VARImages
from visspec.testing import check_drafter
from visspec.tree import roots
from visspec.types import Request, RuleTraits, Sampling, Verdict

# --- tokens -----------------------------------------------------------------------------------------------------------


def sharp(drafter):
    if (head := getattr(drafter, "head", None)) is not None:
        with torch.no_grad():
            head.codes.weight.mul_(20.0)
    return drafter


def wide(drafter):
    drafter.width, drafter.nodes = 3, 9
    return drafter


BLOCK_SHAPES = [{"tree": "opt"}, {"tree": "3-4-2"}, {"tree": "eagle"}]
UNTRAINED = [*(f"{name}{shared}" for name in ("context", "recycling") for shared in ("", ":shared=false")),
             "context:shared=false,nodes=6,levels=3", "layers", "layers:exit=1",
             "context:sources=matches+answers,nodes=3"]  # fmt: skip
DECODERS = ("llama", "qwen3_vl", "gemma3")
CHECKED = {"eagle", "msd", "vispec", "flash", "eagle3"}  # of LLaVA: in test_published, and trained as presets
HEADS = [form for form in test_eagle_heads.FORMS if form not in CHECKED]
OF_FAMILIES = [("qwen2_5_vl", form) for form in ("eagle3", "vispec", "flash", "specvlm")]
OF_FAMILIES += [("llama", form) for form in ("eagle", "flash", "dream")]
FORMS = {  # of drafters of text: (family, prompts, drafter)
    **{f"{name}, {rows}": ("llava", rows, partial(tiny_drafter, name))
       for name in sorted(TEXT) for rows in ("ragged", "one")[: 1 + (name in ("context", "eagle"))]},
    **{f"{name} of {DECODERS[(n + more) % 3]}": (DECODERS[(n + more) % 3], "ragged", partial(str, name))
       for n, name in enumerate(UNTRAINED) for more in range(1 + (name in ("context", "layers")))},
    "layers:every=2": ("qwen3_vl", "ragged", partial(str, "layers:every=2")),
    **{f"features of {family}": (family, rows, partial(test_eagle.make, family, latents))
       for family, rows, latents in test_eagle.CASES},
    **{f"trees of features of {family}": (family, rows, lambda f=family, n=n: wide(test_eagle.make(f, n)))
       for family, rows, n in test_eagle.CASES},
    **{f"features with {s}": ("llava", "ragged", lambda s=s: wide(test_eagle.make("llava")).shaped(**s))
       for s in BLOCK_SHAPES},
    **{f"{form} head of {family}": (family, "ragged", partial(test_eagle_heads.make, family, form))
       for family, form in [*(("llava", form) for form in HEADS), *OF_FAMILIES]},
    **{f"trees of {form} of {family}": (family, "ragged", partial(test_eagle_heads.make, family, form, width=3))
       for family, form in [("llava", "eagle3-normed"), *OF_FAMILIES[1::2]]},
    **{f"{kind} with {shape}": ("llava", "ragged", lambda k=kind, s=shape: test_block_heads.blocks(k).shaped(**s))
       for n, shape in enumerate(BLOCK_SHAPES) for kind in ("flash", "dflash")[n % 2 :: 1 + n % 2]},
    "a head of confidence": ("llava", "ragged", lambda: test_block_heads.dspark().shaped(confidence=0.3)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_text_equals_plain_decoding(name):
    family, rows, make = FORMS[name]
    quick = check_drafter(make(), model_of(family), prompt(family, shapes(family)[rows]), levels=4)
    if "context" in name or "recycling" in name:
        check_drafter(quick.drafter, model_of(family), prompt(family, shapes(family)[rows]), levels=4)


IMAGE_FORMS = [*sorted(set(registry.table("drafter")) - TEXT_ALONE - ELSEWHERE), "distilled:refine=1"]
IMAGE_FORMS += ["image-eagle:tree=dynamic,width=3,nodes=9", "image-eagle:tree=static,shape=3-4-2"]
IMAGE_FORMS += ["image-eagle:window=6", "image-eagle:window=5,levels=1"]


@pytest.mark.filterwarnings("ignore:guidance")
@pytest.mark.parametrize("name, temperature, guidance", [
    *((name, temperature, 3.0) for name in IMAGE_FORMS for temperature in (0.0, 1.0)),
    *((name, 1.0, 1.0) for name in ("jacobi", "distilled", "image-eagle", "image-eagle:tree=static,shape=3-4-2")),
])  # fmt: skip
def test_image_equals_plain_decoding(name, temperature, guidance):
    expected, _ = drawn(janus_pair(None, registry.rule("exact")), ROWS, 0, temperature, guidance)
    setup = janus_pair(sharp(tiny_drafter(name)), registry.rule("exact"))
    result, state = drawn(setup, ROWS, 0, temperature, guidance)
    assert result == expected and ("=" not in name or max(r.levels for r in state.trace.rounds) > 1)
    assert drawn(setup, [1], 0, temperature, guidance)[0] == expected[1:2]


@pytest.mark.parametrize("name", ["distilled", "image-eagle"])
def test_other_guidance_or_grid_warns(name):
    setup = janus_pair(tiny_drafter(name), registry.rule("exact"))
    with pytest.warns(RuntimeWarning, match="guidance: got 6.0, but the drafter was trained with 3.0") as caught:
        for _ in range(2):
            drawn(setup, [0], guidance=6.0)
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match=r"grid: got \(2, 8\), expected \(4, 4\)"):
        tokens, _ = drawn(setup, [0], grid=(2, 8), faults=1)
    assert tokens == drawn(janus_pair(None, registry.rule("exact")), [0])[0]


# --- rows of a batch --------------------------------------------------------------------------------------------------

GROUPS = ([0, 1, 2], [3, 4], [5])  # rows of text that are prefilled together; the last one has no picture
PARTS = ["3 i 4 i 9", "6 i 5", "12 i 2", "5 i 2 i 3", "2 i 6", "15"]


class Some(Rejection):
    """Keeps as many levels as the pending code says, whatever is drafted, and goes on with one of few codes."""

    traits = RuleTraits(judges_draws=True)

    def __call__(self, draft, scores, noise):
        parent, real = draft.tree.parent, torch.ones_like(draft.value, dtype=bool) if draft.real is None else draft.real
        later = ((parent[..., None] == parent[:, None]) & real[:, None]).tril(-1).any(dim=-1)
        kept = real & ~later & (draft.tree.depth <= draft.value[:, :1] % 3)
        following = 5 + categorical(scores.distribution).logits[..., 5:11].argmax(-1)
        return deepest(draft.tree, kept | roots(draft.tree), following)


class SomeVectors(Coupled):
    def __call__(self, draft, scores, noise):
        if draft.tree.size == 1:
            return super().__call__(draft, scores, noise)
        last_B1, index = (draft.value[:, 0, :1] > 0).long(), torch.arange(draft.tree.size)
        after = draft.value[range(len(last_B1)), last_B1[:, 0] + 1]
        return Verdict(torch.where(index <= last_B1, index, -1), last_B1[:, 0] + 1, after)


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
    make = (lambda _: target) if target else lambda traits: family.make_target(traits, False)
    rule = rule or Some()
    more = {"levels": levels, "length": FixedLength, "order": registry.order("raster")}
    return build_setup(drafter, "", rule, family or target.family, make, **more), asked


def of_codes(drafter):
    case, family = made("janus"), made("janus").family

    def asked(rows):
        result, sampling = case.prompt(rows), Sampling(1.0, guidance=case.guidance)
        generators = [torch.Generator().manual_seed(row) for row in rows]
        places = case.layout.positions
        return Request(result, result.ids, places, sampling, grid=case.layout.grid, generators=generators)

    return pictures(stirred(drafter), asked, family)


def of_any_order(drafter, order=None):
    return pictures(
        drafter, lambda rows: test_any_order.asked("caption", rows, Sampling(1.0, guidance=3.0), order),
        test_any_order.family("caption"),
    )  # fmt: skip


def of_mar():
    images, near = (MARImages(test_mar_target.network(0, n), plan=test_mar_target.PLAN) for n in (0.08, 0.079))
    single = {row: test_mar_target.generators(3)[row] for row in range(3)}

    def asked(rows):
        result = test_mar_target.request([(1, 4, 0)[row] for row in rows], Sampling(1.0, guidance=2.0))
        result.generators = [single[row].clone_state() for row in rows]
        return result

    return pictures(SmallMAR(near), asked, rule=SomeVectors(), target=MARTarget(images), levels=2)


def of_scales():
    model = test_scales.network(0)
    target = ScaleTarget(VARImages(model, codec=test_scales.vae()))

    def asked(rows):
        return test_scales.request([(1, 4, 0)[row] for row in rows], Sampling(0.0, guidance=2.0))

    drafter = SmallVAR(test_scales.moved(model, 0.01))
    return pictures(drafter, asked, rule=registry.rule("scales"), target=target, levels=2)


def of_pair(name):
    target, drafter = test_assistants.pair_of(name)
    return texts(target, test_assistants.made(name, target, drafter), "llama", ["13", "8", "15", "12", "9", "6"])


BATCHES = {
    **{name: lambda name=name: of_codes(tiny_drafter(name)) for name in DRAFTERS.keys() - TEXT - {"none"}},
    **{name: lambda name=name: texts(model_of("llava"), tiny_drafter(name)) for name in TEXT - {"none", "jacobi"}},
    "layers": lambda: texts(model_of("llava"), tiny_drafter("layers:exit=1")),
    "context": lambda: texts(model_of("llava"), tiny_drafter("context:shared=false")),
    "block-head": lambda: texts(
        model_of("qwen2_5_vl"), BlockDrafter.for_model(model_of("qwen2_5_vl"), layers=1, block=4, markov=3),
        "qwen2_5_vl",
    ),
    "image-eagle:window": lambda: of_codes(tiny_drafter("image-eagle:window=6")),
    "image-eagle:tree=static": lambda: of_codes(tiny_drafter("image-eagle:tree=static,shape=3-3-3")),
    "jacobi": lambda: of_codes(tiny_drafter("jacobi:redraw=maximal")),
    "jacobi:redraw=gumbel": lambda: of_codes(tiny_drafter("jacobi:redraw=gumbel")),
    "ahead": lambda: of_any_order(test_any_order.Ahead(3), test_any_order.ORDERS["halton"]),
    "mar": of_mar, "var": of_scales, "mtp": lambda: of_pair("mtp"),
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


def test_every_drafter_is_run():
    assert set(registry.table("drafter")) - {"none"} <= set(BATCHES)


@pytest.mark.parametrize("name", sorted(BATCHES))
@torch.inference_mode()
def test_drafts_are_batch_invariant(name):
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
        for result, expected in zip(drafts, alone[row], strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
