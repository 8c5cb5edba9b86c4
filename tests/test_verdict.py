"""Speculative Verdict: the formula by hand, missing pairs, draws, spans; the panel with models that say what they must.
The best of several images.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import visspec
from tests.test_cli import refused
from visspec.api import best_of, loading, verdict
from visspec.api.verdict import Member, Panel, answer_of, choose, disagreement, likelihood
from visspec.cli.main import main
from visspec.io import included
from visspec.toys import judges

tables = st.integers(2, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.none() | st.floats(-9, 0), min_size=n, max_size=n), min_size=n, max_size=n
    )
)  # fmt: skip


def test_the_score_by_hand():
    """Peers 1 and 2 give draft 0's answer 1.0 and 0.5 less than their own; peer 0 likes draft 1's more than its own."""
    table = [[-1.0, -0.5, -4.0], [-3.0, -2.0, -2.5], [-1.5, -1.25, -1.0]]
    assert disagreement(table) == [0.75, 0.125, 1.75]


def test_a_missing_pair_is_left_out_and_is_no_agreement():
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


def test_the_lowest_are_chosen_and_draws_are_by_lot():
    def chosen(scores, keep, seed=0):
        return choose(scores, keep, torch.Generator().manual_seed(seed))

    assert chosen([0.3, 0.1, None, 0.2], 2) == [1, 3]
    assert chosen([0.3, None], 2) == [0] and chosen([None, None], 1) == []
    counts = [sum(chosen([0.0, 0.0, 0.0], 1, seed)[0] == i for seed in range(300)) for i in range(3)]
    assert min(counts) > 70
    assert chosen([0.0, 0.0, 0.0], 2, 5) == chosen([0.0, 0.0, 0.0], 2, 5)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("  blue .", "blue ."),
        ("<think>red?</think> <answer> two\nrings </answer>", "two\nrings"),
        ("<answer>no</answer> then <Answer>yes</Answer>", "yes"),
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}} .", r"\frac{1}{2}"),
        (r"never closed \boxed{1", r"never closed \boxed{1"),
    ],
)
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


def test_a_likelihood_is_that_of_the_answers_tokens_only(captioner):
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

    def told(member, *arguments):
        if member.name == "broken":
            raise RuntimeError("made up\nand more")
        return (said[member.name], 3) if member.name in said else real(member, *arguments)

    monkeypatch.setattr(verdict, "ask", told)
    more = [Member(name, captioner.fast, captioner.processor) for name in ("liar", "mute", "broken")]
    panel = Panel([more[0], captioner, more[1], small, more[2]], captioner, keep=2, template="{question}")
    found = panel(image, question, max_new_tokens=20)
    assert found.answer == right and "not lossless" in found.guarantee
    assert [d.chosen for d in found.drafts] == [False, True, False, True, False]
    assert found.drafts[2].error == "mute: got no answer" and found.drafts[4].error == "broken: made up"
    assert found.drafts[0].score > found.drafts[1].score and found.drafts[2].score is None
    prompted = Panel([captioner, small], captioner, keep=1)(image, question, max_new_tokens=4)
    assert prompted.prompt.count(question) == 2 and f"1. {right}" in prompted.prompt
    alone = Panel(more[1:], captioner, keep=1)(image, question, max_new_tokens=20)
    assert alone.prompt == question and alone.answer == right  # nobody to listen to
    for members, keep, words in (([captioner], 1, "drafts: got 1"), ([captioner, small], 3, "keep: got 3")):
        with pytest.raises(ValueError, match=words):
            Panel(members, captioner, keep=keep)


def test_the_command(captioner, tmp_path, capsys):
    image, question, right = asked()
    image.save(tmp_path / "a.png")
    argv = ["answer", str(tmp_path / "a.png"), question, "--drafts", "captioner", "captioner-small", "--model"]
    out = tmp_path / "v.json"
    assert main([*argv, "captioner", "--template", "{question}", "--json", str(out)]) in (0, None)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [right, "guarantee: selection (not lossless)"] and printed[0].startswith("* captioner (0.")
    record = json.loads(out.read_text())
    assert record["answer"] == right and len(record["likelihoods"]) == 2 and record["keep"] == 2
    assert "drafts: got 1, expected two" in refused(capsys, *argv[:5], "--model", "captioner")


def test_the_best_of_several_pictures():
    right, wrong = Image.new("RGB", (48, 48)), Image.new("RGB", (48, 48), "white")
    assert best_of.best([1.0, 3.0, 3.0]) == 1
    with pytest.raises(ValueError, match="scorer: got 'taste', expected detector, or clip:MODEL"):
        best_of.scorer("taste", ["x"])
    with pytest.raises(ValueError, match="expected a sentence of the shape world's grammar"):
        best_of.scorer("detector", ["a dog"])
    assert judges.by_detector([right, wrong], "a photo of a red ring") == [-1.0, -1.0]
    scene = next(s for s in held_out_scenes(40) if len(s.things) >= 2)
    kinds = [shape.kind for shape in scene.things]
    one = next(k for k in kinds if kinds.count(k) == 1)
    assert judges.by_detector([wrong, to_image(scene)], f"a photo of a {one}") == [-1.0, 1.0]


def test_best_of_in_generate(folder, tmp_path, capsys, monkeypatch):
    argv = ["generate", "a photo of a red ring", "-n", "2", "--model", str(folder), "-o"]
    assert main([*argv, str(tmp_path / "all"), "--seed", "3"]) in (0, None)
    monkeypatch.setattr(judges, "by_detector", lambda images, prompt: [float(i == 1) for i in range(len(images))])
    record = tmp_path / "r.json"
    best = [*argv, str(tmp_path / "best"), "--best-of", "3", "--scorer", "detector", "--seed", "2", "--batch-size", "2"]
    assert main([*best, "--json", str(record)]) in (0, None)
    rows = json.loads(record.read_text())["results"]
    assert [row["seed"] for row in rows] == [3, 6] and rows[0]["selected_from"] == [0.0, 1.0, 0.0]
    assert all(row["guarantee"] == "selection (not lossless)" and row["best_of"] == 3 for row in rows)
    first, same = (Image.open(tmp_path / part / "00000.png").tobytes() for part in ("all", "best"))
    assert first == same and len(list((tmp_path / "best").iterdir())) == 2
    assert "--best-of: got 2 and --scorer None" in refused(capsys, *argv, str(tmp_path), "--best-of", "2")
    assert "--best-of: got 2 beside --ray" in refused(capsys, *argv, str(tmp_path), "--best-of", "2", "--ray")
