"""Readers on miniature files in the published forms, rule-based scores against hand-made cases, the resumable loop."""

import json
import math
import signal
from pathlib import Path

import pytest
from PIL import Image

from tests.children import forked
from tests.eval.test_geneval import Counting, make_root
from visspec.eval.metrics import geneval, readers, tasks, text_scores
from visspec.eval.metrics.text_scores import bleu, cider_d, letter, normalise_answer, rouge_l, vqa_accuracy, yes_no
from visspec.toys import scenes as shapes
from visspec.toys.world import captions


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (1, 2, 3)).save(path)
    return path


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


# --- scores ---


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Two dogs.", "2 dogs"),
        ("a  red,  car", "red car"),
        ("isn't", "isnt"),
        ("3.5", "3.5"),
        ("<b>Yes</b>!", "b yes b"),
    ],
)
def test_answers_are_normalised(answer: str, expected: str):
    assert normalise_answer(answer) == expected


def test_vqa_accuracy_leaves_one_out():
    answers = ["red"] * 3 + ["blue"] * 7
    assert vqa_accuracy("Red.", answers) == pytest.approx((3 * 2 / 3 + 7 * 1) / 10)
    assert vqa_accuracy("blue", answers) == 1.0 and vqa_accuracy("green", answers) == 0.0
    assert vqa_accuracy("red", ["red"] + ["x"] * 9) == pytest.approx(9 * (1 / 3) / 10)
    assert vqa_accuracy("two", ["2"]) == 1.0
    with pytest.raises(ValueError, match="at least one"):
        vqa_accuracy("x", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", "B"),
        ("(C) because", "C"),
        ("The answer is B.", "B"),
        ("A", "A"),
        ("A cat is shown.", "A"),  # spells the first choice
        ("A dog is shown, so the answer is C", "C"),
        ("I think it is a dog", "B"),
        ("cat or dog", None),
        ("E", None),
        ("", None),
    ],
)
def test_letters_are_read(text: str, expected: str | None):
    assert letter(text, ["cat", "dog", "a bird"]) == expected


def test_yes_and_no_are_whole_words():
    assert yes_no("Yes, it is.") == "yes" and yes_no("No") == "no" and yes_no("I know eyes") is None


def test_bleu_rouge_and_cider_on_known_cases():
    same = ["a man rides a brown horse", "two dogs run on the wet grass"]
    refs = [[same[0], "a person on a horse"], [same[1], "dogs playing outside"]]
    assert bleu(same, refs) == pytest.approx(1) and rouge_l(same[0], refs[0]) == pytest.approx(1)
    assert bleu(["x y z w"], [["a b c d"]]) == 0 and rouge_l("x", ["a"]) == 0 and rouge_l("", ["a"]) == 0
    # Three of four words in order against five: P = 3/4, R = 3/5.
    p, r, b = 3 / 4, 3 / 5, 1.2
    assert rouge_l("a b c x", ["a b c d e"]) == pytest.approx((1 + b * b) * p * r / (r + b * b * p))
    # Unigram hits 4/5, bigrams 3/4, trigrams 2/3, 4-grams 1/2; same length.
    assert bleu(["a b c d x"], [["a b c d e"]]) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 / 2) ** 0.25)
    assert bleu(["a b c d"], [["a b c d e"]]) == pytest.approx(math.exp(1 - 5 / 4))
    good, bad = cider_d(same, refs), cider_d(same[::-1], refs)
    assert min(good) > 4 and max(bad) < 0.01
    # One reference equal to the caption in a set of two unrelated ones: the full score.
    assert cider_d(same, [[same[0]], [same[1]]]) == pytest.approx([10, 10])
    assert cider_d([""], [[""]]) == [0] and rouge_l("", [""]) == rouge_l("a", [""]) == 0
    # References of unequal number: hits 5, 3, 2, 1 of 6, 4, 2, 1; the closest have 4 and 2 words, as given.
    assert bleu(["a b c d", "x y"], [["a b c d"], ["x", "x z", "b"]]) == pytest.approx((5 / 6 * 3 / 4) ** 0.25)
    with pytest.raises(ValueError, match="different counts: 2 predictions and 1"):
        bleu(same, refs[:1])


# --- readers ---


def test_coco_captions(tmp_path: Path):
    images = [{"id": i, "file_name": f"{i:012d}.jpg", "licence": 1} for i in (7, 8, 9)]
    rows = [{"image_id": i, "caption": f"caption {i} {j}", "id": 1} for i in (7, 8) for j in range(2)]
    source = write(tmp_path / "c.json", {"images": images, "annotations": rows, "info": {}})
    picture(tmp_path / "im" / "000000000007.jpg")
    task = readers.coco_captions(source, tmp_path / "im")
    assert [s.id for s in task.samples] == ["7"] and task.samples[0].answers == ("caption 7 0", "caption 7 1")
    assert len(task.problems) == 1 and "000000000008.jpg" in task.problems[0]
    out = tasks.run(task, lambda image, text: "caption 7 0", tmp_path / "r.jsonl", "m")
    assert out["score"] is None and out["rouge_l"] == pytest.approx(1) and out["problems"] == list(task.problems)


def test_textvqa_vqav2_and_gqa(tmp_path: Path):
    for name in ("abc.jpg", "COCO_val2014_000000000042.jpg"):
        picture(tmp_path / name)
    row = {"question_id": 1, "image_id": "abc", "question": "what?", "answers": ["stop"] * 10, "set": "val"}
    task = readers.textvqa(write(tmp_path / "t.json", {"data": [row]}), tmp_path)
    assert task.score(task.samples[0], "STOP!") == 1.0 and task.prompt(task.samples[0]).startswith("what?\nAnswer")
    asked = write(tmp_path / "q.json", {"questions": [{"image_id": 42, "question": "how many?", "question_id": 5}]})
    told = {"question_id": 5, "answers": [{"answer": "2", "answer_confidence": "yes"}] * 10}
    task = readers.vqav2(asked, write(tmp_path / "a.json", {"annotations": [told]}), tmp_path)
    assert task.score(task.samples[0], "two") == 1.0
    (tmp_path / "COCO_val2014_000000000042.jpg").rename(tmp_path / "COCO_test2015_000000000042.jpg")
    task = readers.vqav2(asked, tmp_path / "a.json", tmp_path, prefix="COCO_test2015_")
    assert [s.id for s in task.samples] == ["5"]
    rows = {"77": {"imageId": "abc", "question": "colour?", "answer": "red", "semantic": []}}
    task = readers.gqa(write(tmp_path / "g.json", rows), tmp_path)
    assert (task.score(task.samples[0], "Red."), task.score(task.samples[0], "blue")) == (1.0, 0.0)


def test_scienceqa_and_mmmu(tmp_path: Path):
    row = {
        "question": "which?",
        "choices": ["cat", "dog"],
        "answer": 1,
        "hint": "look",
        "image": "image.png",
        "split": "test",
    }
    picture(tmp_path / "test" / "3" / "image.png")
    source = write(tmp_path / "p.json", {"3": row, "4": row | {"image": None}, "5": row | {"split": "val"}})
    task = readers.scienceqa(source, tmp_path)
    assert [s.id for s in task.samples] == ["3"]
    picture(tmp_path / "val" / "5" / "image.png")
    assert [s.id for s in readers.scienceqa(source, tmp_path, split="val").samples] == ["5"]
    assert task.prompt(task.samples[0]).startswith("look\nwhich?\nA. cat\nB. dog\nAnswer with")
    assert (task.score(task.samples[0], "B."), task.score(task.samples[0], "A.")) == (1.0, 0.0)

    picture(tmp_path / "m.png")
    rows = [
        {"id": "a", "question": "q <image 1>", "options": "['1', '2', '3']", "answer": "C", "image_1": "m.png"},
        {"id": "b", "question": "q", "options": [], "answer": "7", "image_1": "m.png", "image_2": None},
        {"id": "c", "question": "q", "options": [], "answer": "7", "image_1": "m.png", "image_2": "m.png"},
    ]
    (tmp_path / "mmmu.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = readers.mmmu(tmp_path / "mmmu.jsonl", tmp_path)
    assert [s.id for s in task.samples] == ["a", "b", "c"] and task.problems == ()
    assert [len(s.files) for s in task.samples] == [1, 1, 2] and task.samples[0].open().size == (8, 8)
    assert task.score(task.samples[0], "(C)") == 1.0 and task.score(task.samples[1], "seven") == 1.0


def test_mmmu_questions_of_several_images(tmp_path: Path):
    for i in (1, 2, 7):
        picture(tmp_path / f"{i}.png")
    row = {"id": "a", "question": "Is <image 1> like <image 2>?", "options": "['<image 3>', 'no']", "answer": "A",
           "image_1": "1.png", "image_2": "2.png", "image_7": "7.png"}  # fmt: skip
    rows = [row, row | {"id": "b", "question": "<image 2> then <image 1>?"}, row | {"id": "c", "image_7": "none.png"}]
    task = readers.mmmu(write(tmp_path / "m.json", rows), tmp_path)
    assert [s.id for s in task.samples] == ["a", "b"] and task.problems[0].startswith("c: there is no image file")
    seen = []
    tasks.run(task, lambda images, text: seen.append((len(images), text)) or "A", tmp_path / "r.jsonl", "m")
    assert [n for n, _ in seen] == [3, 3] and seen[0][1].startswith("Is <image 1> like <image 2>?\nA. <image 3>")
    outside = write(tmp_path / "o.json", [row | {"image_7": "../7.png"}])
    with pytest.raises(ValueError, match="leads out of"):
        readers.mmmu(outside, tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_mme_counts_accuracy_and_pairs(tmp_path: Path, nested: bool):
    for category in ("colour", "count"):
        for name in ("1", "2"):
            texts = tmp_path / category / ("questions_answers_YN" if nested else "")
            picture(tmp_path / category / ("images" if nested else "") / f"{name}.jpg")
            texts.mkdir(parents=True, exist_ok=True)
            (texts / f"{name}.txt").write_text("Is it?\tYes\nIs it not?\tNo\n")
    task = readers.mme(tmp_path)
    assert len(task.samples) == 8
    texts = ["yes"] * 8
    texts[1] = "No."  # both right for the first image of `colour`
    scores = task.aggregate(task.samples, texts)
    assert scores == {"mme/colour": 75 + 50, "mme/count": 50 + 0, "mme": 175}
    bad = next(tmp_path.rglob("*.txt"))
    bad.write_text("no tab here")
    with pytest.raises(ValueError, match="without a tab"):
        readers.mme(tmp_path)


def test_bad_files_are_sentences(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no file"):
        readers.gqa(tmp_path / "none.json", tmp_path)
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        readers.gqa(tmp_path / "b.json", tmp_path)
    with pytest.raises(ValueError, match="not a textvqa file: KeyError 'data'"):
        readers.textvqa(write(tmp_path / "t.json", {"x": 1}), tmp_path)
    row = {"imageId": "../secret", "question": "q", "answer": "a"}
    with pytest.raises(ValueError, match="leads out of"):
        readers.gqa(write(tmp_path / "g.json", {"1": row}), tmp_path / "im")
    with pytest.raises(ValueError, match=r"no sample whose image exists; the first problem: 1: there is no image file"):
        readers.gqa(write(tmp_path / "g.json", {"1": row | {"imageId": "x"}}), tmp_path)


# --- the loop and the shape world ---


def test_run_resumes_after_a_torn_line_and_lists_broken_images(tmp_path: Path):
    for i in range(5):
        picture(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes(b"broken")
    samples = tuple(tasks.Sample(str(i), tmp_path / f"{i}.png", "<b>q</b>", ("yes",)) for i in range(5))
    task, results, calls = tasks.Task("t", samples, 8, tasks.yes_or_no), tmp_path / "r.jsonl", []

    def generate(image, text):
        calls.append(text)
        return "yes"

    first = tasks.run(task, generate, results, "m")
    assert first["score"] == 0.8 and first["n"] == 5 and len(first["problems"]) == 1 and "3.png" in first["problems"][0]
    lines = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(lines[0] + lines[1] + lines[2][:10])
    calls.clear()
    assert tasks.run(task, generate, results, "m") == first and calls == ["<b>q</b>"] * 2
    with pytest.raises(ValueError, match="another task or model"):
        tasks.run(task, generate, results, "other")
    with pytest.raises(ValueError, match="has no sample"):
        tasks.run(tasks.Task("t", (), 8, tasks.exact), generate, results, "m")


@pytest.mark.parametrize(
    "run",
    [
        "tasks.run(scenes.shape_questions(8), step, RESULTS, 'm')",
        "geneval.evaluate(ROOT, RESULTS, ShapeDetector())",
    ],
)
def test_a_killed_run_loses_no_finished_row(tmp_path: Path, run: str):
    """SIGKILL at the fourth of eight; the three that are finished are in the file, and not asked or judged again."""
    code = (
        "import os, signal\nfrom visspec.eval.metrics import geneval, tasks\nfrom visspec.toys import scenes\n"
        "from visspec.toys.world.detector import ShapeDetector\nlook = ShapeDetector.detect\n"
        "ShapeDetector.detect = lambda *given: step() and look(*given)\n"
        "steps = []\ndef step(*given):\n    steps.append(given)\n    if len(steps) == 4:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n    return 'x'\n"
    )
    root, results = make_root(tmp_path / "a", 4, 2), tmp_path / "r.jsonl"
    process = forked(code + run.replace("ROOT", repr(str(root))).replace("RESULTS", repr(str(results))), tmp_path / "o")
    process.join(120)
    assert process.exitcode == -signal.SIGKILL and results.read_bytes().count(b"\n") == 3
    Counting.calls, asked = 0, []
    if "tasks" in run:
        out = tasks.run(shapes.shape_questions(8), lambda image, text: asked.append(text) or "x", results, "m")
        assert len(asked) == 5 and out["n"] == 8
    else:
        report = geneval.evaluate(root, results, Counting())
        assert Counting.calls == 5 and report.summary["images"] == 8 and report.summary["overall"] == 1.0


def test_ranks_results_in_one_file_count_once(tmp_path: Path):
    """Three ranks of a sampler that pads with repeats: their files one after the other are one run."""
    task, files = shapes.shape_questions(8), []
    for rank, chosen in enumerate([(0, 3, 6), (1, 4, 7), (2, 5, 0)]):
        part = tasks.Task(**{**vars(task), "samples": tuple(task.samples[i] for i in chosen)})
        files.append(tmp_path / f"{rank}.jsonl")
        tasks.run(part, lambda image, text: "red", files[-1], "m")
    together = tmp_path / "all.jsonl"
    together.write_bytes(b"".join(file.read_bytes() for file in files))
    asked = []
    out = tasks.run(task, lambda image, text: asked.append(text) or "red", together, "m")
    assert (
        out == tasks.run(task, lambda image, text: "red", tmp_path / "one.jsonl", "m") and not asked and out["n"] == 8
    )


def test_shape_tasks_score_the_truth_one_and_a_lie_less(tmp_path: Path):
    truth, questions = shapes.shape_captions(6), shapes.shape_questions(6)
    for task in (truth, questions):
        assert len(task.samples) == 6
        scores = [task.score(s, s.answers[0]) for s in task.samples]
        assert scores == [1.0] * 6
    sample = truth.samples[0]
    swap = {"large": "small", "small": "large"}
    lie = " ".join(swap.get(word, word) for word in sample.answers[0].split())
    n, facts = len(sample.extra["scene"].things), len(captions.facts(sample.extra["scene"]))
    assert truth.score(sample, lie) == pytest.approx((facts - n) / facts)  # every size is wrong, nothing else
    assert truth.score(sample, "") == 0
    assert questions.score(questions.samples[0], "something else") == 0
    assert truth.samples[0].open().size == (96, 96)
    small = tasks.subset(truth, 3, seed=1)
    assert len(small.samples) == 3 and {s.id for s in small.samples} <= {s.id for s in truth.samples}
    with pytest.raises(ValueError, match=r"1\.\.6"):
        tasks.subset(truth, 7)


def test_words_drop_punctuation():
    assert text_scores.words("A man's dog, 3.5 kg!") == ["a", "mans", "dog", "3.5", "kg"]
