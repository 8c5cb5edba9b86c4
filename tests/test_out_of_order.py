"""Images out of raster order: the limits where every method is plain decoding, and what happens between them."""

import functools
from types import SimpleNamespace

import pytest
import torch

from tests.image_cases import CASES, expected, made
from tests.tiny_images import CODES, SIDE, janus, prompts, sibling
from visspec.accept.exact import Exact
from visspec.accept.local import Local, spread
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.loop.orders import RejectedRegions, islands
from visspec.loop.out_of_order import decode_wavefront
from visspec.loop.safe_drafter import SafeDrafter
from visspec.models.drafting import checkpoint as feature_checkpoint
from visspec.models.image_codes.family import ImageLayout
from visspec.models.image_codes.target import ImageAR
from visspec.models.jacobi.drafter import Jacobi
from visspec.models.janus.target import Janus
from visspec.models.lowres import drafter as lowres
from visspec.models.lowres.drafter import LowRes
from visspec.models.lowres.upsampler import Upsampler, UpsamplerConfig
from visspec.types import FREE, Capabilities, Drafter, DrafterTraits, Request, Sampling

PLACES = SIDE * SIDE
KINDS = [(0.0, 1.0), (1.0, 3.0)]  # temperature, guidance
each_kind = pytest.mark.parametrize("temperature,guidance", KINDS, ids=["greedy", "sampled-guided"])


class Lined(Janus):
    """The tiny Janus with a row end of grammar behind every row of codes, and a leading one."""

    grammar = 2

    def layout(self, height=None, width=None):
        return ImageLayout((SIDE, SIDE), torch.tensor([CODES + 1, *([FREE] * SIDE + [CODES]) * SIDE]))

    def embed(self, tokens):
        words = self.model.get_input_embeddings()(tokens.clamp(min=CODES) - CODES + 25)
        return torch.where((tokens < CODES)[..., None], super().embed(tokens.clamp(max=CODES - 1)), words)


class Led(Lined):
    """Grammar leads, and nothing stands behind the codes."""

    def layout(self, height=None, width=None):
        return ImageLayout((SIDE, SIDE), torch.tensor([CODES + 1, *[FREE] * PLACES]))


@functools.cache
def family(kind=Janus):
    return kind(janus(), None)


def drafter(**options):
    return LowRes(Janus(sibling(), None), family(), **options)


def request(temperature=1.0, guidance=3.0, rows=(0, 1, 2), kind=Janus, seed=0):
    ids, attention = prompts(3)
    rows, layout = list(rows), family(kind).layout()
    prompt = family(kind).from_ids(ids[rows], attention[rows], guidance != 1.0)
    asked = Request(prompt, prompt.ids, layout.positions, Sampling(temperature, guidance=guidance), grid=layout.grid)
    if layout.positions > PLACES:
        asked.fixed = layout.fixed
    if temperature:
        asked.generators = [torch.Generator().manual_seed(seed + row) for row in rows]
    return asked


def plain(*args, **options):
    asked = request(*args, **options)
    return decode(ImageAR(family(options.get("kind", Janus))), None, Exact(), asked, FixedLength(1))


def joined(order, target):
    """The order as a setup has it."""
    order.rule.bind(target.capabilities)
    return order.bind(order.rule, SafeDrafter(order.drafter, target.capabilities))


def run(order, *args, **options):
    target = ImageAR(family(options.get("kind", Janus)))
    return decoded(order, target, request(*args, **options))


def decoded(order, target, asked):
    plan = joined(order, target)
    return decode_wavefront(target, asked, plan.schedule)


class Draft(Drafter):
    """A fixed draft for every prompt, right up to place `upto` of what plain decoding gives."""

    traits = DrafterTraits(whole_images=True)

    def __init__(self, right=None, upto=0):
        self.right, self.upto = right, upto

    def sketch(self, state):
        rows = []
        for row, ids in enumerate(state.request.prompt):
            codes = torch.randint(CODES, (PLACES,), generator=torch.Generator().manual_seed(int(ids.sum())))
            if self.right is not None:
                codes[: self.upto] = torch.tensor(self.right[row][: self.upto])
            rows.append(codes)
        return torch.stack(rows)


class Chosen(Local):
    """Draws again what it was told to: one list of places for each row."""

    def __init__(self, places, **options):
        super().__init__(k=1, **options)
        self.places = places

    def again(self, p_BNV, x_BN, real_BN, columns):
        mask = torch.zeros_like(x_BN, dtype=torch.bool)
        for b, row in enumerate(self.places):
            mask[b, row] = True
        return mask


def pad_free(tokens):
    """Codes alone, of rows with grammar."""
    return [[t for t in row if t < CODES] for row in tokens]


# --- the pass that overwrites -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@torch.no_grad()
def test_revise_is_verify(guidance):
    from visspec import tree as trees

    target, asked = ImageAR(family()), request(1.0, guidance)
    tokens = torch.tensor(plain(1.0, guidance).tokens)
    state, _ = target.prefill(asked)
    state.output.tokens = [[0]] * 3
    places = torch.arange(PLACES).expand(3, -1)
    seen = torch.ones(3, PLACES, dtype=torch.bool)
    revised = target.revise(state, tokens, places, seen).distribution.logits
    shuffled = torch.stack([torch.randperm(PLACES) for _ in range(3)])
    again = target.revise(state, tokens.gather(1, shuffled), shuffled, seen).distribution.logits
    one = target.revise(state, tokens[:, 5:6], places[:, 5:6], seen).distribution.logits
    state, _ = target.prefill(asked)
    state.output.tokens, state.position = [[0]] * 3, state.position + 1
    verified = target.verify(state, trees.chain_draft(tokens[:, 0], tokens[:, 1:])).distribution.logits
    torch.testing.assert_close(revised, verified, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, revised.gather(1, shuffled[..., None].expand_as(again)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one, revised[:, 5:6], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_absent_and_unseen_places():
    target = ImageAR(family())
    tokens = torch.tensor(plain().tokens)
    places, seen = torch.arange(PLACES).expand(3, -1), torch.ones(3, PLACES, dtype=torch.bool)
    seen[:, 7] = False
    distributions = []
    for junk in (0, 9):
        state, _ = target.prefill(request())
        altered = tokens.clone()
        altered[:, 7] = junk
        target.revise(state, altered, places, seen)
        holes = torch.where((places % 3 == 2) & (places != 5), FREE, places)
        distributions.append(target.revise(state, altered, holes, seen).distribution.logits)
        whole = target.revise(state, tokens, places, seen).distribution.logits
        torch.testing.assert_close(distributions[-1][:, 5], whole[:, 5])
    others = [n for n in range(PLACES) if n != 7 and (n % 3 != 2 or n == 5)]
    torch.testing.assert_close(distributions[0][:, others], distributions[1][:, others])
    assert not torch.allclose(distributions[0][:, 7], distributions[1][:, 7])


# --- limits -----------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("kind", [Janus, Lined])
@pytest.mark.parametrize("radius,window", [(2, None), (0, SIDE), (0, 12)])
def test_tau_above_one_is_plain_decoding(temperature, guidance, kind, radius, window):
    """Also with a window of the whole image, or more."""
    plan = RejectedRegions(Local(1.1, radius, k=3, window=window), Draft())
    state, expected = run(plan, temperature, guidance, kind=kind), plain(temperature, guidance, kind=kind)
    assert state.tokens == expected.tokens
    assert len(state.trace.rounds) == PLACES  # the judgement of a block gives its first code
    assert state.drift.abs().max() < 1e-3


@each_kind
@pytest.mark.parametrize("kind", [Janus, Lined])
def test_tau_zero_takes_the_draft(temperature, guidance, kind):
    plan = RejectedRegions(Local(0.0, 3, k=3), Draft())
    state = run(plan, temperature, guidance, kind=kind)
    expected = Draft().sketch(type("S", (), {"request": request()})).tolist()
    assert pad_free(state.tokens) == expected and len(state.trace.rounds) == 1
    codes = [o for row, kinds in zip(state.tokens, state.trace.origin) for t, o in zip(row, kinds) if t < CODES]
    assert set(codes) == {"drafted"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("upto", [0, 6, 11])
def test_island_behind_right_prefix(temperature, upto):
    """Keys and values of the wrong draft are overwritten, those of the right prefix are kept."""
    expected = plain(temperature).tokens
    plan = RejectedRegions(Chosen([list(range(upto, PLACES))] * 3), Draft(expected, upto))
    state = run(plan, temperature)
    assert state.tokens == expected and len(state.trace.rounds) == PLACES - upto
    assert [o == "drafted" for o in state.trace.origin[0]] == [u < upto for u in range(PLACES)]
    assert state.memory[0] == [1] * upto + [1 + n for n in range(PLACES - upto)]


@pytest.mark.parametrize("name", CASES)
def test_every_family_has_the_limits(name):
    """Positions in two and three dimensions, grammar, images drawn after a preview: greedy, against the references."""
    case = made(name)

    def drawn(plan, rows):
        prompt, layout = case.prompt(rows), case.layout
        sampling = Sampling(guidance=case.guidance)
        asked = Request(prompt, prompt.ids, layout.positions, sampling, grid=layout.grid, fixed=layout.fixed)
        return decoded(plan, ImageAR(case.family), asked)

    (high, wide), reference = case.layout.grid, [expected(name, row) for row in range(3)]
    if case.family.codebook is None:
        pytest.skip("without a codebook nothing is drawn out of order")
    random = torch.randint(case.family.codes, (1, high * wide), generator=torch.Generator().manual_seed(0))
    draft = type("D", (Draft,), {"sketch": lambda self, state: random.expand(len(state.rows), -1)})()
    state = drawn(RejectedRegions(Local(1.1), draft), [0, 1, 2])
    assert state.tokens == reference and float(state.drift.abs().max()) == 0
    for way in (RejectedRegions(Local(1.1, window=1), draft), RejectedRegions(Local(0.02, k=2, window=1), draft)):
        together = drawn(way, [0, 1, 2])
        assert [drawn(way, [row]).tokens[0] for row in range(3)] == together.tokens
        assert len(drawn(way, [0]).trace.rounds) < len(state.trace.rounds)


# --- between the limits -----------------------------------------------------------------------------------------------

PLANS = {
    "local": lambda: RejectedRegions(Local(0.03, 0, k=2), Draft()),
    "local-window": lambda: RejectedRegions(Local(0.03, 1, window=1), Draft()),
    "lowres": lambda: RejectedRegions(Local(0.03, 0), drafter(upsample="latent")),
}


@pytest.mark.parametrize("kind", [Janus, Lined])
@pytest.mark.parametrize("name", PLANS)
def test_a_row_does_not_know_its_batch(name, kind):
    together = run(PLANS[name](), kind=kind)
    again = run(PLANS[name](), kind=kind)
    assert together.tokens == again.tokens and together.rows == [] and together.finished == {0, 1, 2}
    for row in range(3):
        alone = run(PLANS[name](), rows=[row], kind=kind)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.trace.origin[0] == together.trace.origin[row]
        torch.testing.assert_close(alone.drift[0], together.drift[row], rtol=1e-3, atol=1e-3)
        gained = sum(sum(r.committed) for r in alone.trace.rounds)
        assert gained == PLACES - (alone.memory[0].count(0) - (len(alone.tokens[0]) - PLACES))
    assert together.trace.times.keys() >= {"prefill", "verify", "accept", "audit"}


@torch.no_grad()
def test_code_above_for_missing_row_end():
    """The first code of row 1, decided when two codes of row 0 are there, from a forward of the stock decoder."""
    state = run(RejectedRegions(Local(1.1, window=2), Draft()), 0.0, 1.0)
    model, (ids, attention), tokens = janus(), prompts(3), torch.tensor(state.tokens)
    drawn = torch.cat([tokens[:, :2], tokens[:, :1]], dim=1)
    embeds = torch.cat([model.get_input_embeddings()(ids), model.prepare_embeddings_for_image_generation(drawn)], 1)
    length = ids.shape[1]
    positions = torch.tensor([*range(length), length, length + 1, length + SIDE - 1]).expand(3, -1)
    mask = torch.cat([attention.long(), torch.ones(3, 3, dtype=torch.long)], dim=1)
    hidden = model.model.language_model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions)
    distribution = model.model.generation_head(hidden.last_hidden_state[:, -1])
    assert distribution.argmax(-1).tolist() == tokens[:, SIDE].tolist() and state.memory[0][SIDE] == 3


@torch.no_grad()
def test_drift_of_kept_codes():
    state = run(RejectedRegions(Local(0.0), Draft()), 1.0, 1.0)
    model, (ids, attention), tokens = janus(), prompts(3), torch.tensor(state.tokens)
    drawn = model.prepare_embeddings_for_image_generation(tokens)
    length = ids.shape[1]
    hidden = model.model.language_model(
        inputs_embeds=torch.cat([model.get_input_embeddings()(ids), drawn], dim=1),
        attention_mask=torch.cat([attention.long(), torch.ones(3, PLACES, dtype=torch.long)], dim=1),
        position_ids=torch.arange(length + PLACES).expand(3, -1),
    ).last_hidden_state[:, length - 1 : -1]
    p = model.model.generation_head(hidden).softmax(-1)
    drift = (1 - p.gather(2, tokens[..., None])[..., 0]).sum(1)
    torch.testing.assert_close(state.drift, drift, rtol=1e-3, atol=1e-3)


# --- islands ----------------------------------------------------------------------------------------------------------


def grid(text):
    return torch.tensor([[c == "x" for c in line] for line in text.split()])[None]


@pytest.mark.parametrize("before,radius,after", [
    ("..... ..x.. .....", 0, "..... ..x.. ....."),
    ("..... ..x.. .....", 1, "..... ..xx. .xxx."),  # nothing before the first rejected place
    ("x.... ..... ....x", 1, "xx... xx.xx ...xx"),
    ("....x x.... .....", 1, "....x xx.xx xx..."),
    ("..... ..... .....", 3, "..... ..... ....."),
    ("..... ...x. .....", 9, "..... ...xx xxxxx"),
])  # fmt: skip
def test_rejections_spread_behind_the_first(before, radius, after):
    assert torch.equal(spread(grid(before), radius), grid(after))


@pytest.mark.parametrize("mask,expected", [
    ("x.x ... x.x", [[0], [2], [6], [8]]),
    ("x.. .x. ..x", [[0, 4, 8]]),
    (".xx x.. ...", [[1, 2, 3]]),
    ("xx. ... .xx", [[0, 1], [7, 8]]),
    ("xxx x.x xxx", [[0, 1, 2, 3, 5, 6, 7, 8]]),
    ("..x x.. ...", [[2], [3]]),  # neighbours in raster order, not in the image
    ("... ... ...", []),
])  # fmt: skip
def test_islands_touch_at_corners(mask, expected):
    places = [n for n, on in enumerate(grid(mask).flatten().tolist()) if on]
    assert islands(places, {n: divmod(n, 3) for n in range(9)}) == expected


@pytest.mark.parametrize("kind", [Janus, Lined])
def test_islands_go_on_together(kind):
    # row 0: two islands of two and four codes; row 1: two of one code, the second waits for the first; row 2: none
    again = [[0, 1, 10, 11, 14, 15], [3, 4], []]
    state = run(RejectedRegions(Chosen(again), Draft()), kind=kind)
    assert [r.committed for r in state.trace.rounds] == [[11, 15, 16], [2, 1], [1], [1], [1]]
    kept = torch.tensor(pad_free(state.tokens)) == Draft().sketch(type("S", (), {"request": request()}))
    for b in range(3):
        assert all(kept[b, u] for u in range(PLACES) if u not in again[b])
    codes = [[o for t, o in zip(*row) if t < CODES] for row in zip(state.tokens, state.trace.origin)]
    assert [[u for u in range(PLACES) if row[u] == "plain"] for row in codes] == again


@pytest.mark.parametrize("kind", [Janus, Lined])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_island_rows_follow_row_above(kind, window):
    """A window of w codes: a row starts w passes behind the row above; passes are fewer, and the drift is not 0."""
    state = run(RejectedRegions(Local(1.1, window=window), Draft()), kind=kind)
    passes = [[p for p, t in zip(*row) if t < CODES] for row in zip(state.memory, state.tokens)]
    assert passes == [[1 + i * window + j for i in range(SIDE) for j in range(SIDE)]] * 3
    assert len(state.trace.rounds) == SIDE + (SIDE - 1) * window
    assert bool((state.drift > 0.1).all())


def test_one_place_a_row_of_an_island():
    """Three sides of a square: its right side waits for what is left of it, its rows only for the window above."""
    again = [u for u in range(PLACES) if u not in (5, 9)]
    state = run(RejectedRegions(Chosen([again] * 3, window=1), Draft()))
    passes = torch.tensor(state.memory[0]).view(SIDE, SIDE)
    assert passes.tolist() == [[1, 2, 3, 4], [2, 1, 4, 5], [3, 1, 5, 6], [4, 5, 6, 7]]


def test_a_broken_drafter_costs_speed_only():
    class Broken(Draft):
        def __init__(self, result):
            self.result = result

        def sketch(self, state):
            if self.result is None:
                raise RuntimeError("no")
            return self.result

    expected = plain().tokens
    for result in (None, torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, PLACES)):
        with pytest.warns(RuntimeWarning, match="decoding goes on without it"):
            state = run(RejectedRegions(Local(0.0), Broken(result)))
        assert state.tokens == expected and state.trace.faults == 1
    strange = torch.full((3, PLACES), CODES + 7)
    assert run(RejectedRegions(Local(0.0), Broken(strange))).tokens == expected


# --- local acceptance as a rule ---------------------------------------------------------------------------------------


IMAGE = Capabilities(vocab=4, codebook=torch.tensor([[0.0], [1.0], [5.0]]))


def test_pooled_mass_counts_the_code_itself():
    """Alone it has its own probability, with one other 0 and 1 pool, and 2 with 1, with all everything; no grammar."""
    p, x = torch.tensor([[[0.3, 0.25, 0.45, 0.0]] * 5]), torch.tensor([[0, 1, 2, 3, 3]])
    kinds = (1, 0.3, [True, False, True]), (1, 0.5, [False] * 3), (3, 0.99, [True] * 3), (2, 0.5, [True] * 3)
    for k, tau, kept in kinds:
        rule = Local(tau, k=k)
        rule.bind(IMAGE)
        assert rule.within_tolerance(p, x).tolist() == [[*kept, False, False]]
    drift = rule.drift(p, x, torch.tensor([[True, False, True, False, False]]))
    assert float(drift) == pytest.approx(0.7 + 0.55)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [Janus, Lined, Led])
def test_local_in_the_ordinary_loop(temperature, kind):
    """Raster order: tau above 1 is plain decoding, tau 0 takes every draft."""
    target = ImageAR(family(kind))
    for tau in (1.1, 0.0):
        rule, low = Local(tau), LowRes(Janus(sibling(), None), family(kind), window=5, upsample="latent")
        rule.bind(target.capabilities)
        guarded = SafeDrafter(low, target.capabilities)
        assert low.traits.levels == 5
        state = decode(target, guarded, rule, request(temperature, kind=kind), FixedLength(5))
        guarded.finish(state)
        assert state.trace.faults == 0
        if tau:
            assert state.tokens == plain(temperature, kind=kind).tokens
        else:
            assert all(result.committed == [6] * 3 for result in state.trace.rounds[:-1]), "grammar's ids too"
            assert bool((state.drift > 0).all())


# --- the low-resolution sibling ---------------------------------------------------------------------------------------


def test_the_small_image_is_the_siblings_own():
    ids, attention = prompts(3)
    target, low = ImageAR(family()), drafter()
    state, _ = target.prefill(request(0.0))
    options = {"generation_mode": "image", "do_sample": False, "guidance_scale": 3.0}
    stock = sibling().generate(input_ids=ids, attention_mask=attention.long(), **options)
    assert torch.equal(low.small(state), stock)

    class Words:  # texts are read by the sibling's processor
        def __call__(self, text, **options):
            rows = [int(t) for t in text]
            return {"input_ids": ids[rows], "attention_mask": attention[rows].long()}

    low.family = Janus(sibling(), Words())
    state.request.media = {"texts": ["2", "1", "0"]}
    assert torch.equal(low.small(state), stock.flip(0))
    state.request.media = {"texts": ["2", "1", "0"], "negatives": ["2", "1", "0"]}  # away from itself: no guidance
    unguided, _ = target.prefill(request(0.0, 1.0))
    unguided.request.media = {"texts": ["2", "1", "0"]}
    assert torch.equal(low.small(state), low.small(unguided)) and not torch.equal(low.small(state), stock.flip(0))


@torch.no_grad()
def test_upsamplers(monkeypatch):
    small = torch.tensor([[1, 2, 3, 4], [5, 5, 5, 5]])
    latent = drafter(upsample="latent").upsample_codes(small, (SIDE, SIDE))
    assert latent[0].view(SIDE, SIDE).tolist() == [[1, 1, 2, 2]] * 2 + [[3, 3, 4, 4]] * 2
    assert latent[1].tolist() == [5] * PLACES
    bicubic = drafter().upsample_codes(small, (SIDE, SIDE))
    assert bicubic.shape == latent.shape and torch.equal(bicubic, drafter().upsample_codes(small, (SIDE, SIDE)))
    assert bool(((bicubic >= 0) & (bicubic < CODES)).all())
    colour = torch.tensor([0.2, 0.5, 0.9])[None, :, None, None]
    monkeypatch.setattr(Janus, "pixels", lambda self, tokens, layout: colour.expand(1, 3, 16, 16))
    flat = drafter().upsample_codes(small[:1], (SIDE, SIDE))
    whole = janus().model.vqmodel.encode(2 * colour.expand(1, 3, 32, 32) - 1).image_tokens
    assert torch.equal(flat[0], whole)


def upsampler(folder, codes=CODES):
    torch.manual_seed(3)
    model = Upsampler(UpsamplerConfig(codes, width=8, layers=1))
    feature_checkpoint.write(folder, model, {})
    return model.eval()


@torch.no_grad()
def test_learned_upsampler(tmp_path):
    small = torch.tensor([[1, 2, 3, 4], [5, 5, 5, 5]])
    logits = upsampler(tmp_path)(small.view(2, 2, 2))
    assert logits.shape == (2, SIDE, SIDE, CODES)
    loaded = drafter(upsample=str(tmp_path))
    assert torch.equal(loaded.upsample_codes(small, (SIDE, SIDE)), logits.argmax(-1).flatten(1))
    upsampler(tmp_path / "other", CODES + 1)
    with pytest.raises(ValueError, match=f"upsample: got an up-sampler of {CODES + 1} codes"):
        drafter(upsample=str(tmp_path / "other"))


# --- what is refused --------------------------------------------------------------------------------------------------


def knowing(word, model):
    processor = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {word: 1}))
    return Janus(model, processor)


def shaped(rows, columns):
    made = Janus(janus(), None)
    made.layout = lambda height=None, width=None: ImageLayout((rows, columns), torch.full((rows * columns,), FREE))
    return made


def asked(**changes):
    """What needs raster order."""
    result = request()
    for name, value in changes.items():
        setattr(result, name, value)
    return decoded(RejectedRegions(Local(), Draft()), ImageAR(family()), result)


@pytest.mark.parametrize("make,sentence", [
    (lambda: LowRes(family(), upsample="nearest"), "upsample: got 'nearest', expected one of bicubic, latent"),
    (lambda: LowRes(family(), family(), window=0), "window: got 0, expected at least 1"),
    (lambda: LowRes(Janus(janus(3), None), family()), "another codebook, expected the target's 24 codes"),
    (lambda: LowRes(Janus(sibling(8), None), family()), r"grid of \(8, 8\), expected at most the target's \(4, 4\)"),
    (lambda: RejectedRegions().bind(Local(), Jacobi()), "drafter: The order .islands. needs a drafter of whole image"),
    (lambda: RejectedRegions().bind(Exact(), Draft()), "acceptance: got Exact, expected local"),
    (lambda: Local(k=4).bind(IMAGE), "k: got 4, expected at most 3 neighbours in a codebook of 3"),
    (lambda: LowRes(knowing("a", sibling())).attach(knowing("b", janus())), "another tokenizer, expected that of the"),
    (lambda: lowres.check_siblings(shaped(4, 5), shaped(3, 5)), r"grid of \(4, 5\), expected at most the target's"),
    (lambda: lowres.check_siblings(shaped(3, 4), shaped(5, 3)), r"grid of \(3, 4\), expected at most the target's"),
    (lambda: asked(stop=lambda ids: False), "stop: This option needs raster order"),
    (lambda: asked(eos=frozenset({3})), "eos: This option needs raster order"),
    (lambda: asked(sampling=Sampling(1.0, guidance=3.0, processors=(lambda ids, logits: logits,))),
     "processors: This option needs raster order"),
])  # fmt: skip
def test_refusals(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
    lowres.check_siblings(shaped(3, 5), shaped(3, 5))
    LowRes(knowing("a", sibling()), knowing("a", janus()))


def test_sibling_grammar():
    """A sibling of the target's size that is the target draws what plain decoding does, row ends and all."""
    state, _ = ImageAR(family(Lined)).prefill(request(0.0, kind=Lined))
    drawn = torch.tensor(plain(0.0, kind=Lined).tokens)
    assert torch.equal(LowRes(family(Lined), family(Lined)).small(state), drawn[:, family(Lined).layout().free])
