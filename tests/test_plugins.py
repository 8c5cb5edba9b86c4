"""Names from outside: `visspec.register`, entry points of other packages, and presets, in Python and in the shell."""

import json
import warnings

import pytest
import torch

import visspec
from tests.doubles import Careless, Double, chain_of, raises_line
from tests.tiny import model_of, prompt, shapes
from visspec import registry, testing
from visspec.accept.typical import Typical
from visspec.cli.main import main
from visspec.models.lookup.context import ContextDrafter
from visspec.types import RuleTraits

PLUGIN = '''
import visspec
from visspec.models.lookup.context import ContextDrafter


class Bigram(ContextDrafter):
    """Looks the last word up."""

    def __init__(self, back: int = 1):
        super().__init__(nodes=back, sources="matches", shared=False)


def register():
    visspec.register("drafter", "bigram", Bigram)
    visspec.register("rule", "loose", "visspec.accept.typical:Typical", "keeps a lot")
    visspec.register("length", "two", "visspec.loop.draft_length:FixedLength", "as `fixed`")
    visspec.register("family", "my_image", "visspec.models.janus.target:Janus", "as Janus", "codes")
    visspec.register("preset", "mine", visspec.Preset("bigram", "loose", "my paper"), needs="text")


def fail():
    raise RuntimeError("no luck")
'''
POINTS = "[visspec.plugins]\nbroken = my_plugin:fail\ngone = my_plugin_2:register\nmine = my_plugin:register\n"


def test_plugins(tables, tmp_path, monkeypatch):
    """Entry points add names; of those that fail each warns once."""
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    about = tmp_path / "my_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_plugins_called", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "bigram" in registry.table("drafter") and "ngram" in registry.table("drafter")
        assert registry.table("rule")["loose"].load() is Typical
    message = [str(one.message) for one in caught if "plug-in" in str(one.message)]
    assert len(message) == 2 and "'broken' (my_plugin:fail) failed" in message[0] and "no luck" in message[0], message
    assert registry.table("drafter")["bigram"].what == "Looks the last word up."
    assert "my_image" in registry.table("family")
    testing.check_drafter("bigram:back=2", model_of("llama"), prompt("llama", shapes("llama")["one"]))
    testing.check_rule("loose", pairs=2)
    fast = visspec.accelerate(model_of("llama"), preset="mine", length="two:levels=2")
    assert fast.name == "bigram" and fast.rule.traits.guarantee == "approximate" and fast.length_policy.levels == 2


class Bigram(ContextDrafter):
    """Looks the last word up."""

    def __init__(self):
        super().__init__(nodes=1, sources="matches", shared=False)


@pytest.fixture
def tables(monkeypatch):
    """The registry, restored afterwards."""
    registry.load_plugins()
    for kind, table in registry.TABLES.items():
        monkeypatch.setitem(registry.TABLES, kind, dict(table))
    monkeypatch.setattr(registry, "PRESETS", {name: dict(by) for name, by in registry.PRESETS.items()})
    monkeypatch.setattr(registry, "_added", set())


def test_registered_drafter(tables, tmp_path, capsys):
    visspec.register("drafter", "bigram", Bigram)
    visspec.register("drafter", "bigram", Bigram)  # a cell of a notebook that runs again
    fast = testing.check_drafter("bigram", model_of("llama"), prompt("llama", shapes("llama")["one"]))
    fast.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "visspec.json").read_text())["drafter"] == "bigram"
    assert visspec.Accelerated.from_pretrained(tmp_path).name == "bigram"
    assert main(["list", "drafters"]) == 0 and "Looks the last word up." in capsys.readouterr().out


@pytest.mark.parametrize("arguments,said", [
    (("drafter", "ngram", Bigram), "'ngram' is built in"), (("rule", "exact", Typical), "'exact' is built in"),
    (("drafters", "x", Bigram), "got 'drafters'"), (("preset", "x", None), "got 'preset' that needs ''"),
    (("drafter", "x", Bigram, "", "poems"), "that needs 'poems'"),
])  # fmt: skip
def test_what_cannot_be_registered(tables, arguments, said):
    with raises_line(said):
        visspec.register(*arguments)


# --- contracts that are broken ----------------------------------------------------------------------------------------


class Understated(Typical):
    """Measures half of its drift."""

    def __call__(self, draft, scores, noise):
        verdict = super().__call__(draft, scores, noise)
        return type(verdict)(verdict.path, verdict.length, verdict.next, verdict.drift / 2)


class Boasting(Typical):
    traits = RuleTraits("exact", judges_draws=True)


def test_rule_contract():
    for name in ("exact", "rejection", "block", "typical", "typical:epsilon=0.3,delta=0.8", "cool"):
        testing.check_rule(name, pairs=2)
    for rule in (Careless(), Understated(0.3, 0.8), Boasting(0.3, 0.8)):
        with pytest.raises(AssertionError, match=type(rule).__name__):
            testing.check_rule(rule)


class Wrong(Double):
    """Drafts ids that the model does not have."""

    def propose(self, state, depth):
        return chain_of(state.pending, torch.full((len(state.rows), depth), 10**6))


def test_the_contract_of_a_drafter_can_fail():
    with pytest.raises(AssertionError, match="drafts of Wrong are invalid"), pytest.warns(RuntimeWarning):
        testing.check_drafter(Wrong(), model_of("llama"), prompt("llama", shapes("llama")["one"]))


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.presets("text"))
def test_a_preset_of_text(name):
    model, preset = model_of("llama"), registry.presets("text")[name]
    fast = visspec.accelerate(model, preset=name)
    assert preset.drafter == "auto" or fast.name == registry.parse(preset.drafter)[0]
    assert type(fast.rule) is type(registry.rule(preset.acceptance))
    assert visspec.accelerate(model, "ngram", preset=name).name == "ngram"


def test_preset_of_pipeline_and_call(folder, tmp_path):
    asked = {"prompt": "a photo of a red ring", "seed": 1, "output_type": "latent"}
    pipe = visspec.ImagePipeline.from_pretrained(folder)
    before = pipe(**asked)
    expected = pipe(**asked, **registry.preset("coupled", "codes").method).tokens[0]
    result = pipe(**asked, preset="coupled")
    assert torch.equal(result.tokens[0], expected) and result.stats[0].drafter == "jacobi"
    assert torch.equal(pipe(**asked).tokens[0], before.tokens[0]), "a preset is that of its call alone"
    assert pipe(**asked, preset="coupled", drafter="none", acceptance="exact").stats[0].drafter == "none"
    other = visspec.ImagePipeline.from_pretrained(folder, preset="coupled")
    assert (other.drafter, other.acceptance) == ("jacobi:redraw=maximal,window=16", "rejection")
    assert torch.equal(other(**asked).tokens[0], expected)
    other.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "visspec.json").read_text())
    assert (stored["drafter"], stored["acceptance"]) == (other.drafter, other.acceptance)
    again = visspec.ImagePipeline.from_pretrained(tmp_path / "saved", preset="plain")
    assert (again.drafter, again.acceptance) == ("none", "exact")
    with raises_line("preset: got 'coupld', .* such as coupled, "):
        visspec.ImagePipeline.from_pretrained("no/such-model", preset="coupld")


# --- the list ---------------------------------------------------------------------------------------------------------


def test_list_is_short(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    for kind, plural in registry.KINDS.items():
        assert main(["list", plural]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(registry.table(kind)) and len(lines) <= 40
        classes = [str(entry.target).partition(":")[2] for entry in registry.table(kind).values()]
        assert kind == "family" or not any(name and name in " ".join(lines) for name in classes)
    assert main(["list", "rules"]) == 0 and "(k=100,delta=0.1)" in capsys.readouterr().out


def test_list_json(capsys):
    assert main(["list", "--json"]) == 0
    rows = {(row["kind"], row["name"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["rule", "lantern"]["options"] == {
        "k": {"type": "int", "default": 100}, "delta": {"type": "float", "default": 0.1}
    }  # fmt: skip
    assert rows["preset", "coupled"]["arguments"]["codes"]["acceptance"] == "rejection"
    assert rows["drafter", "image-eagle"]["trained"] and rows["drafter", "image-eagle"]["needs"] == "codes"
