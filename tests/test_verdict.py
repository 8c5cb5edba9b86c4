"""Speculative Verdict: the formula by hand, missing pairs, ties, spans; models that say what they must."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import visspec
from tests.doubles import refused
from visspec.api import loading, verdict
from visspec.api.verdict import Member, answer_of, choose, decide, disagreement, likelihood
from visspec.cli.main import main
from visspec.io import included

tables = st.integers(2, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.none() | st.floats(-9, 0), min_size=n, max_size=n), min_size=n, max_size=n
    )
)  # fmt: skip


def test_the_score_by_hand():
    """Peers 1 and 2 give draft 0's answer 1.0 and 0.5 less than their own; peer 0 likes draft 1's more than its own."""
    table = [[-1.0, -0.5, -4.0], [-3.0, -2.0, -2.5], [-1.5, -1.25, -1.0]]
    assert disagreement(table) == [0.75, 0.125, 1.75]


def test_missing_pairs():
    table = [[-1.0, -2.0, -1.0], [-2.0, -1.0, None], [-3.0, -1.0, -1.0]]
    assert disagreement(table) == [1.5, 0.5, 0.0]
    table[1][1] = None  # peer 1 has no answer of its own: nobody can be compared with it
    assert disagreement(table) == [2.0, 0.5, 0.0]
    assert disagreement([[-1.0, None], [None, -1.0]]) == [None, None]


@given(tables, st.randoms(use_true_random=False))
def test_the_order_of_the_models_changes_nothing(table, random):
    order = list(range(len(table)))
    random.shuffle(order)
    again = disagreement([[table[b][a] for a in order] for b in order])
    assert again == pytest.approx([disagreement(table)[a] for a in order], nan_ok=True)
    assert all(score is None or score >= 0 for score in again)


def test_lowest_chosen():
    def chosen(scores, keep, seed=0):
        return choose(scores, keep, torch.Generator().manual_seed(seed))

    assert chosen([0.3, 0.1, None, 0.2], 2) == [1, 3]
    assert chosen([0.3, None], 2) == [0] and chosen([None, None], 1) == []
    counts = [sum(chosen([0.0, 0.0, 0.0], 1, seed)[0] == i for seed in range(300)) for i in range(3)]
    assert min(counts) > 70
    assert chosen([0.0, 0.0, 0.0], 2, 5) == chosen([0.0, 0.0, 0.0], 2, 5)


@pytest.mark.parametrize("text, answer", [
    ("  blue .", "blue ."), ("<think>red?</think> <answer> two\nrings </answer>", "two\nrings"),
    ("<answer>no</answer> then <Answer>yes</Answer>", "yes"),
    (r"so \boxed{1} or rather \boxed{\frac{1}{2}} .", r"\frac{1}{2}"),
    (r"never closed \boxed{1", r"never closed \boxed{1"),
])  # fmt: skip
def test_the_span_that_answers(text, answer):
    assert answer_of(text) == answer


@pytest.fixture(scope="module")
def captioner(captioner):
    return Member("captioner", visspec.accelerate(captioner[0], "none"), captioner[1])


@pytest.fixture(scope="module")
def small():
    model, processor = loading.load("captioner-small")
    return Member("small", visspec.accelerate(model, "none"), processor)


def asked() -> tuple[Image.Image, str, str]:
    """A held-out picture, a question about it and its answer, as the tokenizer writes it."""
    scenes = included.scenes("shapes")
    row = scenes.rows[0]
    return scenes.images(1)[0], row["questions"][0], row["answers"][0].replace(" .", ".")


def test_likelihood_of_answer(captioner):
    image, question, right = asked()
    result = captioner.fast.generate(
        **verdict.prepare(captioner.processor, [image], question, captioner.fast.model), max_new_tokens=20,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    new = result.sequences[0, -len(result.logits) :]
    steps = torch.stack([step[0].log_softmax(-1)[i] for step, i in zip(result.logits, new)])[:-1]  # without the end
    assert likelihood(captioner, image, question, right) == pytest.approx(float(steps.mean()), abs=1e-5)
    assert likelihood(captioner, image, question, "yellow") < likelihood(captioner, image, question, right)
    assert likelihood(captioner, image, question, "") is None


def test_a_panel(captioner, small, monkeypatch):
    image, question, right = asked()
    said = {"liar": "no shapes at all .", "mute": ""}
    real = verdict.ask

    def told(member, *arguments, **generate):
        if member.name == "broken":
            raise RuntimeError("made up\nand more")
        return said[member.name] if member.name in said else real(member, *arguments, **generate)

    monkeypatch.setattr(verdict, "ask", told)
    more = [Member(name, captioner.fast, captioner.processor) for name in ("liar", "mute", "broken")]
    members = [more[0], captioner, more[1], small, more[2]]
    with monkeypatch.context() as patch:
        patch.setattr(verdict, "TEMPLATE", "{question}")  # the judge was not taught to read drafts
        found = decide(members, captioner, image, question, keep=2, max_new_tokens=20)
    drafts = found["drafts"]
    assert found["answer"] == right and [d["chosen"] for d in drafts] == [False, True, False, True, False]
    assert drafts[2]["error"] == "mute: got no answer" and drafts[4]["error"] == "broken: made up"
    assert drafts[0]["score"] > drafts[1]["score"] and drafts[2]["score"] is None
    prompted = decide([captioner, small], captioner, image, question, keep=1, max_new_tokens=4)
    assert prompted["prompt"].count(question) == 2 and f"1. {right}" in prompted["prompt"]
    alone = decide(more[1:], captioner, image, question, keep=1, max_new_tokens=20)
    assert alone["prompt"] == question and alone["answer"] == right  # nobody to listen to
    for members, keep, words in (([captioner], 1, "drafts: got 1"), ([captioner, small], 3, "keep: got 3")):
        with pytest.raises(ValueError, match=words):
            decide(members, captioner, image, question, keep=keep)


def test_the_command(captioner, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verdict, "TEMPLATE", "{question}")  # the judge was not taught to read drafts
    image, question, right = asked()
    image.save(tmp_path / "a.png")
    argv = ["answer", str(tmp_path / "a.png"), question, "--drafts", "captioner", "captioner-small", "--model"]
    out = tmp_path / "v.json"
    assert main([*argv, "captioner", "--json", str(out)]) in (0, None)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [right, "guarantee: selection (not lossless)"] and printed[0].startswith("* captioner (0.")
    record = json.loads(out.read_text())
    assert record["answer"] == right and len(record["likelihoods"]) == 2 and record["keep"] == 2
    assert "drafts: got 1, expected two" in refused(capsys, *argv[:5], "--model", "captioner")
