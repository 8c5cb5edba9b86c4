"""Speculative Verdict: the formula by hand, ties, spans; models that say what they must."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import visspec
from tests.doubles import refused
from visspec.api import loading, verdict
from visspec.api.verdict import Member, answer_of, decide, disagreement, likelihood
from visspec.cli.main import main
from visspec.io import included

tables = st.integers(2, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(-9, 0), min_size=n, max_size=n), min_size=n, max_size=n
    )
)  # fmt: skip


def test_the_score_by_hand():
    """Peers 1 and 2 give draft 0's answer 1.0 and 0.5 less than their own; peer 0 likes draft 1's more than its own."""
    table = [[-1.0, -0.5, -4.0], [-3.0, -2.0, -2.5], [-1.5, -1.25, -1.0]]
    assert disagreement(table) == [0.75, 0.125, 1.75]


@given(tables, st.randoms(use_true_random=False))
def test_order_of_models(table, random):
    order = list(range(len(table)))
    random.shuffle(order)
    again = disagreement([[table[b][a] for a in order] for b in order])
    assert again == pytest.approx([disagreement(table)[a] for a in order]) and min(again) >= 0


@pytest.mark.parametrize("text, answer", [
    ("  blue .", "blue ."), ("<think>red?</think> <answer> two\nrings </answer>", "two\nrings"),
    ("<answer>no</answer> then <Answer>yes</Answer>", "yes"),
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


def test_a_panel(captioner, small, monkeypatch):
    image, question, right = asked()
    message = {"liar": "no shapes at all .", "again": "no shapes at all .", "mute": ""}
    real = verdict.ask
    told = lambda member, *asked, **how: message[member.name] if member.name in message else real(member, *asked, **how)  # noqa: E731
    monkeypatch.setattr(verdict, "ask", told)
    liar, again, mute = (Member(name, captioner.fast, captioner.processor) for name in message)
    with monkeypatch.context() as patch:
        patch.setattr(verdict, "TEMPLATE", "{question}")  # the judge was not taught to read drafts
        result = decide([liar, captioner, mute, small], captioner, image, question, keep=2, max_new_tokens=20)
    assert result["answer"] == right and result["chosen"] == [1, 3] and result["drafts"][2] == ""
    assert result["scores"].keys() == {0, 1, 3} and result["scores"][0] > result["scores"][1]
    ties = decide([liar, again, mute], captioner, image, question, keep=1, max_new_tokens=4)
    assert ties["chosen"] == [0] and ties["prompt"].count(question) == 2 and "1. no shapes at all ." in ties["prompt"]
    alone = decide([mute, captioner], captioner, image, question, max_new_tokens=20)
    assert alone["prompt"] == question and alone["answer"] == right  # nobody to listen to


def test_the_command(captioner, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verdict, "TEMPLATE", "{question}")  # the judge was not taught to read drafts
    image, question, right = asked()
    image.save(tmp_path / "a.png")
    argv = ["answer", str(tmp_path / "a.png"), question, "--model", "captioner", "--drafts", "captioner"]
    assert main([*argv, "captioner-small"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [right, "guarantee: selection (not lossless)"] and printed[0].startswith("* captioner (0.")
    assert "drafts: got 1, expected two" in refused(capsys, *argv)
