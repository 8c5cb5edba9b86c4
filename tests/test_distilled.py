"""The distilled drafter: laws it reports and leaves, identity, passes over its own guesses, checkpoints."""

import itertools

import pytest
import torch

from tests.distributions import total_variation
from tests.image_cases import draw, made
from tests.published import judged
from tests.test_image_drafter import check_rejection, check_reported, family, proposed, request, run
from tests.tiny_images import prompts
from visspec import ImagePipeline, registry
from visspec.accept.exact import Exact, follow
from visspec.accept.rejection import Rejection
from visspec.loop.decode import open_request
from visspec.models.distilled.drafter import DistilledDrafter, context_elements
from visspec.models.distilled.head import GUESSED, KNOWN
from visspec.models.image_codes.target import ImageAR
from visspec.sampling import Gumbel, warp
from visspec.types import FREE

SMALL = {"layers": 2, "heads": 2, "intermediate": 32, "levels": 5}


def drafter(seed=1, *, levels=None, refine=6, **config):
    fresh = DistilledDrafter.for_model(family(), seed=seed, **(SMALL | config))
    with torch.no_grad():
        fresh.head.codes.weight.mul_(40.0)
    return DistilledDrafter(fresh.head, family(), levels=levels, refine=refine)


# --- laws -------------------------------------------------------------------------------------------------------------


class Few(Exact):
    """The rule with noise of a few values: row b's numbers of the first places are its combination of `choices`."""

    def __init__(self, choices_KV, places, keep=False):
        self.choices, self.places, self.keep = choices_KV, places, keep

    def make_noise(self, generators, width):
        noise = Gumbel(generators, width)
        every = itertools.product(self.choices, repeat=self.places)
        for b, numbers in enumerate(every):
            noise.ahead[b] = torch.cat([torch.stack(numbers), noise.window(16)[b, self.places :]])
        return noise

    def __call__(self, draft, scores, noise):
        if not self.keep or draft.tree.size == 1:
            return super().__call__(draft, scores, noise)
        drafted = torch.cat([draft.value[:, 1:], super().__call__(draft, scores, noise).next[:, None]], dim=1)
        return follow(draft, drafted)  # the control: whatever was drafted is kept


def enumerated(used, keep=False, places=3, kinds=4):
    """The joint law of the first codes over all noise of a few values, as the loop draws them."""
    generator = torch.Generator().manual_seed(5)
    choices = -torch.log(-torch.log(torch.rand(kinds, 24, generator=generator)))
    ids, attention = prompts(1)
    made = request(ids.expand(kinds**places, -1), attention.expand(kinds**places, -1))
    tokens, state = run(made, used, Few(choices, places, keep))
    assert state.trace.faults == 0
    distribution = torch.zeros((24,) * places, dtype=torch.float64)
    share = torch.full((len(tokens),), kinds**-places, dtype=torch.float64)
    distribution.index_put_(tuple(tokens[:, :places].T), share, True)
    return distribution


def test_law_enumerated_over_noise():
    plain = enumerated(None)
    assert plain.sum() == pytest.approx(1) and int((plain > 0).sum()) > 10
    for refine in (1, 6):
        assert total_variation(enumerated(drafter(refine=refine)), plain) < 1e-12
    assert total_variation(enumerated(drafter(), keep=True), plain) > 0.1


@pytest.mark.parametrize("refine", [2, 6])
def test_reported_laws_and_rejection(refine):
    result = proposed(drafter(refine=refine), ImageAR(family(), features=True), 0.1)
    check_reported(*result)
    check_rejection(*result, seed=0)


# --- outputs ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_draft_sees_known_tokens_only():
    """Of the memory: neither codes read in vain, nor the newest, which is no node yet, nor padding of the prompt."""
    ids, attention = prompts(2)
    used, target = drafter(refine=1), ImageAR(family(), features=True)
    state, scores = open_request(target, Exact(), request(ids, attention))
    used.start(state, scores)
    for _ in range(3):
        judged(target, used, Exact(), state, used.propose(state, 3))
    logits, stored, length = {}, state.memory.stored, ids.shape[1]
    newest = [length + len(state.tokens[row]) - 1 for row in state.rows]
    clean = stored.clone()
    for what in ("nothing", "vain", "padding", "last"):
        stored.copy_(clean)
        for b in range(2):
            part = {"vain": slice(newest[b], None), "last": slice(newest[b] - 1, newest[b])}
            slots = torch.arange(stored.shape[4])[part.get(what, slice(0))]
            slots = (~attention[b]).nonzero()[:, 0] if what == "padding" else slots
            assert len(slots) or what in ("nothing", "padding")
            stored[:, :, b, :, slots] = 9.0
        watch = used.head.register_forward_hook(lambda *call, what=what: logits.update({what: call[-1][0]}))
        used.propose(state, 4)
        watch.remove()
    assert torch.equal(logits["vain"], logits["nothing"]) and torch.equal(logits["padding"], logits["nothing"])
    assert (logits["last"] != logits["nothing"]).flatten(1).any(dim=1).all()


@torch.inference_mode()
def test_settled_draft_is_a_fixed_point():
    """Drafts, and laws for rules that judge draws, are those of the network over the draft itself, in one pass."""
    ids, attention = prompts(3)
    used = drafter(refine=9)
    with torch.no_grad():
        used.head.kinds.normal_(std=0.3)
    for rule in (Exact(), Rejection()):
        state, scores = open_request(ImageAR(family()), rule, request(ids, attention))
        used.start(state, scores)
        draft, known = used.propose(state, 7), state.memory
        assert 2 < state.calls["draft_pass"] < 9
        element, memory, mask = context_elements(known, [0, 0, 0], 7)
        kind = torch.where(element == 0, KNOWN, GUESSED)
        x, _ = used.head(used.table[draft.value[:, :-1]], kind, element, memory, mask)
        distribution = warp(used.head.logits(x), state.request.sampling)
        drawn = (distribution + (known.noise or state.noise).window(7)[..., :24]).argmax(dim=-1)
        assert torch.equal(drawn, draft.value[:, 1:])
        if draft.q is not None:
            torch.testing.assert_close(draft.q.p[:, 1:], distribution.softmax(dim=-1), rtol=1e-4, atol=1e-6)
        state.calls.clear()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_ends_never_drafted(temperature):
    """Of a layout with grammar the network reads its ids, whatever it would have guessed there."""
    case = made("emu3")
    size = {"rows": case.layout.grid[0], "columns": case.layout.positions // case.layout.grid[0]}
    used = DistilledDrafter.for_model(case.family, **SMALL, **size)
    entered = []
    used.head.register_forward_pre_hook(lambda module, given: entered.append((given[0], given[2])))
    plain, _ = draw(case, [0, 1, 2], temperature=temperature)
    assert draw(case, [0, 1, 2], used, temperature=temperature)[0] == plain
    fixed, seen = case.layout.fixed, 0
    for embeds, element in entered[1:]:
        for b, t in (element[:, 1:] < len(fixed)).nonzero().tolist():
            own = int(fixed[element[b, t + 1]])
            if own != FREE and bool((embeds[b, t + 1] != used.table[0]).any()):
                seen += 1
                assert torch.equal(embeds[b, t + 1], used.table[own])
    assert seen


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"levels": 0}, {"refine": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: got 0, expected at least 1"):
        drafter(**options)


SHIPPED = registry.CHECKPOINTS / "painter-distilled" / "config.json"


@pytest.mark.skipif(not SHIPPED.is_file(), reason="the shipped drafter is not in this checkout")
def test_included_drafter():
    pipe = ImagePipeline.from_pretrained("painter")
    texts = ["a photo of three stars", "a photo of a red cross and a blue ring"]
    plain = pipe(texts, seed=5, drafter="none", output_type="latent")
    fast = pipe(texts, seed=5, output_type="latent", preset="distilled")
    assert all(torch.equal(one, two) for one, two in zip(plain.tokens, fast.tokens))
    passes = [int(numbers.max()) + 1 for numbers in fast.passes]
    assert sum(passes) < 2 * 24 and fast.stats[0].faults == 0 and fast.stats[0].guarantee == "exact"
    assert (SHIPPED.parent / "model.safetensors").stat().st_size < 8e6
