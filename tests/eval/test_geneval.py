"""GenEval: the original's rules by hand-made detections, folders, resuming, bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visspec.eval.metrics import geneval
from visspec.eval.metrics.detection import DetectedColours, Detection, DetectionResult
from visspec.io import included
from visspec.toys.world.detector import ShapeDetector


def thing(label: str, score: float = 0.95, box=(0, 0, 10, 10), colour: str | None = None) -> Detection:
    return Detection(label, score, box, None, colour)


def verdict(metadata: dict, *things: Detection) -> tuple[bool, str]:
    objects = geneval.select_detections(DetectionResult(tuple(things)), geneval.THRESHOLD)
    return geneval.judge(None, objects, metadata, DetectedColours())


ONE = {"tag": "single_object", "include": [{"class": "dog", "count": 1}], "prompt": "a photo of a dog"}
THREE = {
    "tag": "counting", "include": [{"class": "dog", "count": 3}], "exclude": [{"class": "dog", "count": 4}],
    "prompt": "a photo of three dogs",
}  # fmt: skip
RED = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}], "prompt": "a photo of a red dog"}
LEFT = {
    "tag": "position",
    "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}],
    "prompt": "a photo of a dog left of a cat",
}


def test_extra_objects():
    assert verdict(ONE, thing("dog"), thing("dog"), thing("cat")) == (True, "")
    assert verdict(ONE, thing("cat")) == (False, "expected dog>=1, found 0")
    objects = geneval.select_detections(DetectionResult((thing("dog"), thing("cat"))), 0.3)
    assert not geneval.strictly(objects, ONE)
    assert geneval.strictly({"dog": [thing("dog")]}, ONE)
    assert not geneval.strictly({"dog": [thing("dog"), thing("dog")]}, ONE)


def test_counting_wants_the_exact_number():
    for n, expected in ((2, False), (3, True), (4, False), (5, False)):
        assert verdict(THREE, *[thing("dog")] * n)[0] is expected
    assert verdict(THREE, *[thing("dog")] * 4)[1] == "expected dog<4, found 4"


def test_colour_of_best_instance():
    red, blue = thing("dog", 0.9, colour="red"), thing("dog", 0.8, colour="blue")
    assert verdict(RED, blue, red)[0]
    better_blue = thing("dog", 0.99, colour="blue")
    assert verdict(RED, better_blue, red) == (False, "expected red dog>=1, found 1 blue")


def test_thresholds_and_limit():
    result = DetectionResult((thing("dog", 0.3), thing("cat", 0.31), *(thing("cow", 0.9 - i / 100) for i in range(20))))
    objects = geneval.select_detections(result, 0.3)
    assert "dog" not in objects and len(objects["cat"]) == 1 and len(objects["cow"]) == 16
    assert [d.score for d in objects["cow"]] == sorted((d.score for d in objects["cow"]), reverse=True)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ((-30, 0, -20, 10), {"left of"}),
        ((30, 0, 40, 10), {"right of"}),
        ((0, -30, 10, -20), {"above"}),
        ((0, 30, 10, 40), {"below"}),
        ((30, 30, 40, 40), {"right of", "below"}),  # 28/42.4 = .66 on both axes
        ((0, 0, 10, 10), set()),
        ((1, 0, 11, 10), set()),  # offset 1 is less than a tenth of the sizes
        ((3, 0, 13, 10), set()),  # (3 - 2) / 3 is a third
        ((5, 0, 15, 10), {"right of"}),  # (5 - 2) / 5
        ((4, 0, 14, 10), set()),  # exactly one half does not hold
    ],
)
def test_relations_follow_the_shrunk_offset(subject, expected):
    assert geneval.relations(subject, (0, 0, 10, 10)) == expected


def test_position_relation():
    cat = thing("cat", box=(50, 0, 60, 10))
    assert verdict(LEFT, cat, thing("dog"))[0]
    result = verdict(LEFT, thing("cat"), thing("dog", box=(50, 0, 60, 10)))
    assert result[1] == "expected dog left of target, found right of"
    assert verdict(LEFT, thing("dog"))[1] == "expected cat>=1, found 0\nno target for dog to be left of"


# --- folders ---


def make_root(root: Path, count: int = 6, samples: int = 2, extra: dict | None = None) -> Path:
    rng, scenes = np.random.default_rng(0), included.scenes("shapes")
    for i, row in enumerate(scenes.prompts()[:: 368 // count][:count]):
        folder = geneval.write_prompt(root, i, row | (extra or {}))
        for j in range(samples):
            Image.fromarray(scenes.render(row, rng, 64)).save(folder / f"{j:04d}.png")
    return root


def test_clean_shapes_score_one(tmp_path: Path):
    report = geneval.evaluate(make_root(tmp_path / "a"), tmp_path / "r.jsonl")
    s = report.summary
    assert s["overall"] == s["strict"] == s["correct_images"] == s["correct_prompts"] == 1.0
    assert (s["images"], s["prompts"], s["broken"], report.problems) == (12, 6, 0, [])
    assert report.name == "GenEval[shapes]"
    row = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
    assert {"filename", "tag", "prompt", "correct", "reason", "metadata", "details"} <= row.keys()
    assert row["filename"] == "00000/samples/0000.png" and isinstance(row["details"], str)


def test_overall_is_mean_of_tasks():
    rows = [{"tag": "colors", "correct": c, "strict": c, "metadata": str(i)} for i, c in enumerate([1, 1, 1, 0])]
    rows[0]["strict"] = 0
    rows += 2 * [{"tag": "counting", "correct": 0, "strict": 0, "metadata": "x"}]
    s = geneval.summarise(rows)
    assert s["overall"] == pytest.approx((0.75 + 0) / 2) and s["correct_images"] == 0.5 and s["correct_prompts"] == 0.6
    assert s["strict"] == pytest.approx((0.5 + 0) / 2) and list(s["tasks"]) == ["counting", "colors"]
    with pytest.raises(ValueError, match="no result row"):
        geneval.summarise([])


def test_geneval_name(tmp_path: Path, monkeypatch):
    class Original(ShapeDetector):
        original = True

    class OriginalColours(DetectedColours):
        original = True

    root = make_root(tmp_path / "a", 3, samples=4)
    prompts = geneval.read_prompts(root)
    lines = "".join(json.dumps(p.metadata) + "\n" for p in prompts)
    from hashlib import sha256

    full = (prompts, Original(), OriginalColours())
    assert geneval._name(*full) == "GenEval[shapes]"  # not the original's prompts
    monkeypatch.setattr(geneval, "ORIGINAL_PROMPTS", sha256(lines.encode()).hexdigest())
    assert geneval._name(*full) == "GenEval"
    assert geneval._name(prompts, ShapeDetector(), OriginalColours()) == "GenEval[shapes]"
    assert geneval._name(prompts, Original(), DetectedColours()) == "GenEval[shapes]"
    (root / "00001" / "samples" / "0003.png").unlink()
    assert geneval._name(geneval.read_prompts(root), *full[1:]) == "GenEval[shapes]"


def test_broken_images_and_uneven_folders(tmp_path: Path):
    root = make_root(tmp_path / "a", 4, 3)
    (root / "00001" / "samples" / "0001.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (root / "00002" / "samples" / "0002.png").unlink()
    Image.new("RGB", (9, 9)).save(root / "00002" / "samples" / "0000.png")  # readable, too small for the detector
    (root / "00003" / "metadata.jsonl").write_text("{broken")
    (root / "00004" / "samples").mkdir(parents=True)
    report = geneval.evaluate(root, tmp_path / "r.jsonl")
    assert report.summary["images"] == 8 and report.summary["broken"] == 2
    assert report.summary["correct_images"] == 6 / 8
    text = "\n".join(report.problems)
    assert "00001/samples/0001.png" in text and "00002/samples holds 2 images, most folders 3" in text
    assert "00003/metadata.jsonl: not valid JSON" in text and "00004/metadata.jsonl: there is no such file" in text
    assert "00002/samples/0000.png: image: got shape" in text and report.summary["problems"] == 5


@pytest.mark.parametrize(("metadata", "message"), [
    ([], "must be a JSON object, not list"), ({"tag": "x", "prompt": "y"}, "no 'include' of type list"),
    ({"tag": "x", "prompt": "y", "include": [{"count": 1}]}, r"include\[0\] has no 'class'"),
    ({"tag": "x", "prompt": "y", "include": [{"class": "a", "count": 0}]}, "no positive 'count'"),
    ({"tag": "x", "prompt": "y", "include": [{"class": "a", "count": 1, "position": ["near", 0]}]}, "'position'"),
    ({"tag": "x", "prompt": "y", "include": [{"class": "a", "count": 1, "position": ["above", 0]}]}, "earlier"),
])  # fmt: skip
def test_bad_metadata_is_a_sentence(metadata, message):
    with pytest.raises(ValueError, match=message):
        geneval.check_metadata(metadata)


def test_empty_folders_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no numbered prompt folder"):
        geneval.evaluate(tmp_path, tmp_path / "r.jsonl")
    geneval.write_prompt(tmp_path, 0, ONE)
    with pytest.raises(ValueError, match="holds no image; the first problem: 00000/samples"):
        geneval.evaluate(tmp_path, tmp_path / "r.jsonl")
    with pytest.raises(FileNotFoundError, match="no folder"):
        geneval.evaluate(tmp_path / "none", tmp_path / "r.jsonl")


# --- resuming ---


class Counting(ShapeDetector):
    calls = 0

    def detect(self, image):
        type(self).calls += 1
        return super().detect(image)


def test_geneval_resume(tmp_path: Path):
    root, results = make_root(tmp_path / "a"), tmp_path / "r.jsonl"
    whole = geneval.evaluate(root, results)
    lines = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    Counting.calls = 0
    again = geneval.evaluate(root, results, Counting())
    assert Counting.calls == 12 - 5 and again.rows == whole.rows and again.summary == whole.summary
    assert [json.loads(line) for line in results.read_bytes().splitlines()] == whole.rows
    Image.new("RGB", (64, 64), (153, 153, 153)).save(root / "00002" / "samples" / "0001.png")
    Counting.calls = 0
    changed = geneval.evaluate(root, results, Counting())
    assert Counting.calls == 1 and changed.summary["correct_images"] == 11 / 12


def test_foreign_results_are_refused(tmp_path: Path):
    root, results = make_root(tmp_path / "a", 2), tmp_path / "r.jsonl"
    geneval.evaluate(root, results)
    with pytest.raises(ValueError, match=r"got detector .* and records made with"):
        geneval.evaluate(root, results, ShapeDetector(score=0.8))
    results.write_text("hello\n")
    with pytest.raises(ValueError, match="got line 1, expected a JSON object with an id"):
        geneval.evaluate(root, results)
