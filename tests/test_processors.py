"""Processors that keep state, those of the grammar packages among them, and the tokens that grammars force."""

import itertools
import json
import sys
import threading

import jsonschema
import pytest
import torch
import transformers as tf
from PIL import Image
from scipy.stats import chisquare

import visspec
from tests.doubles import NEW, Hostile, TreeOracle, fast, new_tokens, raises_line
from tests.grammars import LONGEST, PACKAGES, SCHEMA, compiled, json_model, json_processor, record, tokenizer
from tests.tiny import EOS, model_of, prompt, shapes
from visspec import grammar
from visspec.api import schemas
from visspec.api.text import processors
from visspec.cli import caption
from visspec.cli.main import main


@pytest.fixture(autouse=True)
def _not_compiled():
    """The packages compile their own functions, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def inputs_of(rows: int) -> dict[str, torch.Tensor]:
    return prompt("llava", (shapes("llava")["ragged"] * 2)[:rows])


def cut(rows: list[list[int]]) -> list[list[int]]:
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


DRAFTERS = {  # by the rows of a batch, from answers: chains and trees for one and for several
    1: lambda known: ("ngram", TreeOracle(known, wrong=0.3)),
    4: lambda known: ("context", TreeOracle(known, wrong=0.3, per_row=True), Hostile()),
}


@pytest.mark.parametrize("package, rows", [*((name, 4) for name in PACKAGES), ("xgrammar", 1), ("llguidance", 1)])
def test_packages_equal_stock(package, rows):
    """Greedy and sampled, with drafters of several kinds, and every output is what the schema allows."""
    inputs, make, model = inputs_of(rows), PACKAGES[package], json_model()
    greedy = {"max_new_tokens": LONGEST, "do_sample": False}
    sampled = {"max_new_tokens": LONGEST, "do_sample": True, "temperature": 1.2, "top_k": 0, "seed": 5}
    expected = new_tokens(model.generate(**inputs, **greedy, **make()), inputs)
    drawn = new_tokens(visspec.accelerate(model, None).generate(**inputs, **sampled, **make()), inputs)
    assert all(record(row) for row in expected + drawn)
    known = [row + [0] * LONGEST for row in expected]
    for drafter in DRAFTERS[rows](known):
        quick = visspec.accelerate(model, drafter, adaptive=False)
        assert new_tokens(quick.generate(**inputs, **greedy, **make()), inputs) == expected
        assert new_tokens(quick.generate(**inputs, **sampled, **make()), inputs) == drawn
        assert quick.last_stats.faults == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_a_stream_forces_tokens_too(package):
    inputs, model = inputs_of(1), json_model()
    options = {"max_new_tokens": LONGEST, "do_sample": False}
    quick = visspec.accelerate(model, "ngram")
    expected = new_tokens(quick.generate(**inputs, **options, **PACKAGES[package]()), inputs)[0]
    answers = list(quick.stream([{**inputs, **options, **PACKAGES[package]()} for _ in range(3)], slots=2))
    assert [answer.tokens for answer in answers] == [expected] * 3
    forced = [n for n, word in enumerate(answers[0].origin) if word == "drafted"]
    assert forced or package not in ("xgrammar", "outlines-xgrammar"), "none of the text was drafted"


@pytest.mark.parametrize("package", ["xgrammar", "outlines-xgrammar"])
def test_forced_text_is_drafted(package, monkeypatch):
    """Without a drafter, fewer passes than tokens; and the tokens are the same as without forced ones."""
    inputs, model, make = inputs_of(1), json_model(), PACKAGES[package]
    options = {"max_new_tokens": LONGEST, "do_sample": False}
    quick = visspec.accelerate(model, None)
    result = quick.run(**inputs, **options, **make())
    assert result.stats.tau > 1.05
    monkeypatch.setattr(grammar, "forced_tokens", lambda state, row: [])
    plain = quick.run(**inputs, **options, **make())
    assert torch.equal(plain.output, result.output) and plain.stats.tau == 1.0


@pytest.mark.parametrize("package", ["xgrammar", "outlines-xgrammar"])
def test_longest_forced_token(package):
    own = processors.at_any_prefix(PACKAGES[package]()["logits_processor"][0], torch.tensor([[1]]))
    ids = lambda text: tokenizer()(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    assert own.forced_token(0, [1, *ids('{"')]) == ids("ground")[0], "`g` begins it, too"
    assert own.forced_token(0, [1, *ids('{"ground": "')]) is None
    assert own.forced_token(0, [1, *ids('{"ground": "a", "first": {"colour": "')]) is None
    whole = ids('{"ground": "a", "first": {"colour": "red", "count": 2}, "seen": true}')
    assert own.forced_token(0, [1, *whole]) == EOS


def walk(matcher: processors.Matcher, tokens: list[int]) -> list[list[int]]:
    return [matcher.allowed(tokens[:n]).tolist() for n in range(len(tokens) + 1)]


def test_matchers_go_to_any_prefix():
    """A matcher that was at other prefixes, ends among them, allows there what a fresh one allows."""
    ids, scores = torch.tensor([[1, 5]]), torch.randn(1, 500)  # ids beyond the grammar's are banned as the package does
    own = processors.at_any_prefix(PACKAGES["xgrammar"]()["logits_processor"][0], ids)
    assert torch.equal(own(ids, scores.clone()), PACKAGES["xgrammar"]()["logits_processor"][0](ids, scores.clone()))
    fresh = lambda: processors.Matcher(compiled(any_whitespace=False))  # noqa: E731
    random, ways = torch.Generator().manual_seed(0), []
    for _ in range(6):
        matcher, tokens = fresh(), []
        while not tokens or tokens[-1] != EOS:
            allowed = matcher.allowed(tokens).nonzero().flatten()
            tokens.append(int(allowed[torch.randint(len(allowed), (), generator=random)]))
        ways.append(tokens)
    expected, used = [walk(fresh(), tokens) for tokens in ways], fresh()
    for n in torch.randint(6, (40,), generator=random).tolist():
        at = int(torch.randint(len(ways[n]) + 1, (), generator=random))
        assert used.allowed(ways[n][:at]).tolist() == expected[n][at]
    assert used.allowed([*ways[0][:3], 5]) is None, "an id that writes nothing"
    assert walk(used, ways[0]) == expected[0], "a refused token leaves it where it was"
    assert used.allowed([*ways[0], 5]).tolist() == expected[0][-1], "tokens behind the end change nothing"


def test_a_row_has_its_own_grammar():
    pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    grammars = [compiled(any_whitespace=False), compiled(any_whitespace=False, schema='{"enum": [12, "red"]}')]
    inputs, options = inputs_of(2), {"max_new_tokens": LONGEST, "do_sample": False}
    make = lambda: {"logits_processor": [LogitsProcessor(grammars)]}  # noqa: E731
    expected = new_tokens(json_model().generate(**inputs, **options, **make()), inputs)
    result = visspec.accelerate(json_model(), "ngram").generate(**inputs, **options, **make())
    assert new_tokens(result, inputs) == expected and record(expected[0])


class Taking(tf.LogitsProcessor):
    """Each call takes the newest token: they add up to what the next call bans. Asserts that none was left out."""

    def __init__(self):
        self.total, self.length, self.tokenizer = 0, None, tokenizer()

    def reset(self):
        self.__init__()

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1), "a token was left out"
        if self.length is not None:
            self.total = (self.total + input_ids[:, -1]) % 3
        self.length = input_ids.shape[1]
        ids = torch.arange(scores.shape[1])
        return scores.masked_fill((ids % 3) == torch.as_tensor(self.total).view(-1, 1), float("-inf"))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_state_is_copied(do_sample):
    inputs = prompt("llava", shapes("llava")["ragged"])
    options = {"max_new_tokens": NEW, "do_sample": do_sample}
    if do_sample:
        drawn = fast("llava", None).generate(**inputs, **options, seed=3, logits_processor=[Taking()])
    else:
        drawn = model_of("llava").generate(**inputs, **options, logits_processor=[Taking()])
    expected = new_tokens(drawn, inputs)
    seeded = {"seed": 3} if do_sample else {}
    for drafter in (None, TreeOracle(expected, wrong=0.3), TreeOracle(expected, wrong=0.3, per_row=True), Hostile()):
        used = Taking()
        result = fast("llava", drafter).generate(**inputs, **options, **seeded, logits_processor=[used])
        assert new_tokens(result, inputs) == expected
        assert used.length is None, "the user's own is left as it was"
    assert processors.fork(used).tokenizer is used.tokenizer


def test_a_watermark_equals_stock():
    """transformers' own processor with state."""
    inputs = prompt("llava", shapes("llava")["ragged"])
    config = tf.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123], context_history_size=16)
    options = {"max_new_tokens": NEW, "watermarking_config": config, "do_sample": False}
    expected = new_tokens(model_of("llava").generate(**inputs, **options), inputs)
    plain = model_of("llava").generate(**inputs, **options | {"watermarking_config": None})
    assert expected != new_tokens(plain, inputs)
    assert new_tokens(fast("llava", TreeOracle(expected, wrong=0.3)).generate(**inputs, **options), inputs) == expected


def test_state_that_cannot_be_copied():
    held = Taking()
    held.lock = threading.Lock()
    inputs = prompt("llava", shapes("llava")["ragged"])
    with raises_line("^logits_processor: the state of .*Taking can't be copied"):
        fast("llava", "ngram").generate(**inputs, max_new_tokens=2, logits_processor=[held])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of a model that writes JSON, a schema's file and a picture."""
    pytest.importorskip("xgrammar")
    folder = tmp_path_factory.mktemp("json")
    json_model().save_pretrained(folder)
    json_processor().save_pretrained(folder)
    schema, picture = folder / "schema.json", folder / "picture.png"
    schema.write_text(json.dumps(SCHEMA))
    Image.new("RGB", (8, 8), "red").save(picture)
    return folder, schema, picture


def test_captions_of_a_schema(files, tmp_path, capsys):
    folder, schema, picture = files
    options = ["--model", str(folder), "--schema", str(schema), "--drafter", "ngram"]
    out = tmp_path / "records.jsonl"
    assert main(["caption", str(picture), *options]) == 0
    text = capsys.readouterr().out
    jsonschema.validate(json.loads(text), SCHEMA)
    assert main(["caption", str(picture), *options, "--out", str(out)]) == 0
    assert json.loads(out.read_text().splitlines()[0])["caption"] == text.strip()
    assert main(["caption", str(picture), *options, "--max-new-tokens", "9"]) == 2
    assert "got 9 tokens that --schema does not allow, expected JSON of it" in capsys.readouterr().err


def test_grammars_refuse_in_a_sentence(files, captioner, tmp_path, monkeypatch):
    model, grammars = json_model(), schemas.JsonGrammars(tokenizer(), json_model(), "schema")
    for schema in (7, {"type": "nonsense"}):
        with raises_line("^schema: This is not a JSON schema, or can't be compiled"):
            grammars.options(schema)
    with raises_line("^--schema: The model's tokenizer can't write JSON such as "):
        schemas.JsonGrammars(captioner[1].tokenizer, captioner[0], "--schema")
    with raises_line("^--schema: got .*gone.json, expected a file with a JSON schema"):
        caption.read_schema(tmp_path / "gone.json")
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with raises_line("^schema: xgrammar is not installed"):
        schemas.JsonGrammars(tokenizer(), model, "schema")


TEXTS = [[7, 8, 9, a, 10, 11, b, 12, EOS] for a, b in itertools.product((20, 21, 22), (30, 31))] + [[7, 8, 40, 41, EOS]]


def spelled(row: int, ids: torch.Tensor, start: int = 0) -> list[int]:
    """The tokens that go on one of the texts."""
    so_far = ids[start:].tolist()
    return sorted(
        {text[len(so_far)] for text in TEXTS if text[: len(so_far)] == so_far and len(so_far) < len(text)} or {EOS}
    )


@pytest.mark.parametrize("rule", ["exact", "rejection", "block"])
def test_the_law_of_texts(rule):
    """Draws with forced tokens have the probabilities that are enumerated by hand, under every exact rule."""
    inputs, model, count = (prompt("llava", shapes("llava")["ragged"][:1]), model_of("llava"), 600)
    start = inputs["input_ids"].shape[1]
    law = []
    for text in TEXTS:
        ids = torch.cat([inputs["input_ids"], torch.tensor([text])], dim=1)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            logits = model(**{**inputs, "input_ids": ids, "attention_mask": mask}).logits[0].float()
        p = 1.0
        for n, token in enumerate(text):
            allowed = spelled(0, ids[0, : start + n], start)
            p *= float(logits[start + n - 1, allowed].softmax(-1)[allowed.index(token)])
        law.append(p)
    assert abs(sum(law) - 1) < 1e-4
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "eos_token_id": EOS, "num_return_sequences": count}
    quick = visspec.accelerate(model, "ngram", acceptance=rule)
    options["prefix_allowed_tokens_fn"] = lambda row, ids: spelled(row, ids, start)
    drawn = cut(quick.generate(**inputs, **options, seed=1)[:, start:].tolist())
    seen = [drawn.count(text) for text in TEXTS]
    assert sum(seen) == count and quick.last_stats.tau > 1.5
    assert chisquare(seen, [count * p for p in law], sum_check=False).pvalue > 1e-3
    assert chisquare(seen, [count / len(law)] * len(law)).pvalue < 1e-6, "another law is detected"
