"""The contract of every row of the registry, each on a tiny configuration: a row without one fails here."""

import inspect

import pytest

from tests.image_cases import CASES, draw, made
from tests.registry_cases import (
    ANY_ORDER,
    CODE_RULES,
    DRAFTERS,
    ELSEWHERE,
    ROWS,
    RULES,
    SMALL,
    TOKENS_ALONE,
    drawn,
    janus_pair,
    tiny_drafter,
)
from visspec import registry
from visspec.accept.graphed_rule import GraphedRule
from visspec.io import included
from visspec.io.checkpoint import read_json
from visspec.loop.draft_length import DraftLengthPolicy
from visspec.loop.setup import check
from visspec.models.image_codes.family import Family
from visspec.models.image_codes.target import ImageAR
from visspec.types import Acceptance, Drafter, Order

# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables():
    drafters, shipped = registry.table("drafter"), included.table().drafters
    assert set(DRAFTERS) == set(drafters) - ELSEWHERE
    bases = {"drafter": Drafter, "rule": Acceptance, "order": Order, "length": DraftLengthPolicy, "family": Family}
    for kind, base in bases.items():
        for name, entry in registry.table(kind).items():
            made_by = entry.load()
            kind_of = type(made_by()) if inspect.isfunction(made_by) else made_by
            assert entry.what and (name == "none" or issubclass(kind_of, base)), name
    assert all(entry.load().draws == entry.needs for entry in registry.table("family").values())
    for name, model in shipped.items():
        assert model.what and drafters[model.kind].checkpoint, name
        assert model.target in included.table().models or "target" in read_json(included.folder(name), "config.json")
    assert not set(drafters) & {*shipped, *registry.table("order")}
    families = {type(made(name).family) for name in CASES}
    listed = {entry.load() for entry in registry.table("family").values()}
    # tests of their own have those of vectors (`test_mar_painter`, `test_continuous_families`), of scales
    # (`test_scales`), of any order (`test_any_order`) and of converted folders (`test_convert`)
    codes = {family for family in listed if family.draws == "codes" and "Stored" not in family.__name__}
    assert codes == families, "an image family without a tiny model"


# --- drafters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(registry.table("drafter")) - ELSEWHERE))
def test_traits_are_what_drafts_show(name):
    drafter = tiny_drafter(name)
    if drafter is None:
        return
    assert isinstance(drafter, Drafter) and drafter.traits.levels >= 1
    trained = {key for key, entry in registry.table("drafter").items() if entry.checkpoint} - TOKENS_ALONE
    assert (drafter.traits.feature_layers != ()) == (name in trained)
    assert drafter.traits.whole_images == (type(drafter).sketch is not Drafter.sketch)


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODE_RULES)
def test_a_rule_is_what_its_traits_say(name):
    """Exact rules measure no drift, the others do; a row does not depend on its batch; recordings change nothing."""
    text = RULES.get(name, name)
    rule = registry.rule(text)
    spec = "jacobi:redraw=maximal" if rule.traits.judges_draws else "jacobi"
    spec = "image-eagle:tree=chain" if rule.traits.whole_chains else spec
    tokens, state = drawn(janus_pair(tiny_drafter(spec), rule), ROWS)
    assert (state.drift is not None) == (rule.traits.guarantee == "approximate")
    assert drawn(janus_pair(tiny_drafter(spec), registry.rule(text)), [2])[0] == tokens[2:]
    captured = GraphedRule(registry.rule(text))
    setup = janus_pair(tiny_drafter(spec), captured)
    assert captured.traits == rule.traits and type(captured.inner) is type(rule)
    assert drawn(setup, ROWS)[0] == tokens


@pytest.mark.parametrize("name", CODE_RULES)
def test_rule_takes_drafts_of_its_traits(name):
    rule, target = registry.rule(RULES.get(name, name)), ImageAR(made("janus").family)
    branching, sampled = tiny_drafter("image-eagle:tree=static,shape=3-3-3"), tiny_drafter("jacobi:redraw=maximal")
    for drafter, refused in (
        (branching, rule.traits.chains_only or (branching.traits.samples and not rule.traits.judges_draws)),
        (sampled, not rule.traits.judges_draws or rule.traits.whole_chains),
        (tiny_drafter("jacobi"), rule.traits.whole_chains),
        (tiny_drafter("image-eagle:tree=chain"), False),
    ):
        if refused:
            with pytest.raises(ValueError, match=r"^drafter: .*expected"):
                check(drafter, rule, target)
        else:
            check(drafter, rule, target)


# --- orders and presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ANY_ORDER))
def test_orders_of_places(name):
    with pytest.raises(ValueError, match=r"order: got .*Only any-order models draw in other orders"):
        janus_pair(None, registry.rule("exact"), registry.order(name))


@pytest.mark.parametrize("name", sorted(name for name, entry in registry.table("order").items() if not entry.needs))
def test_order_decides_every_place(name):
    drafts, rule = {"islands": ("lowres", RULES["local"])}.get(name, ("none", "exact"))
    make = lambda: janus_pair(tiny_drafter(drafts), registry.rule(rule), registry.order(name))  # noqa: E731
    tokens, alone = (drawn(make(), rows)[0] for rows in (ROWS, [1]))
    assert [len(row) for row in tokens] == [made("janus").layout.positions] * 3 and alone == tokens[1:2]
    assert registry.order(name).raster == (tokens == draw(made("janus"), ROWS, temperature=1.0)[0])


@pytest.mark.parametrize("name", registry.presets("codes"))
def test_a_preset_draws(name):
    preset = registry.preset(name, "codes")
    assert preset.source
    text = preset.acceptance
    for large, small in SMALL.items():
        text = text.replace(large, small)
    rule = registry.rule(text)
    setup = janus_pair(tiny_drafter(preset.drafter), rule, registry.order(preset.order))
    tokens, state = drawn(setup, ROWS)
    assert [len(row) for row in tokens] == [made("janus").layout.positions] * 3
    assert (setup.guarantee == "approximate") == (state.drift is not None)
    again = janus_pair(tiny_drafter(preset.drafter), registry.rule(text), registry.order(preset.order))
    assert drawn(again, ROWS)[0] == tokens
    if setup.promises_tokens(False):
        assert tokens == draw(made("janus"), ROWS, temperature=1.0)[0]
