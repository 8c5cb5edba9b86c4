"""`visspec bench caption --data`: files of prompts that others publish, and speed by their categories."""

import json

import pytest
from PIL import Image

from tests.doubles import one_sentence
from visspec.cli import bench_caption, bench_data
from visspec.cli.main import main

MMSPEC = {"id": 7, "image": "a.png", "turns": ["what is here ?", "and there ?"], "category": "chart"}
SPEED = {"question_id": "q1", "category": "coding", "sub_category": "x", "turns": ["write a loop"], "multiturn": False}
VLLM = {"prompt": "compare them", "image_files": ["a.png", "b.png"]}


@pytest.fixture
def home(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (96, 96), "red").save(tmp_path / name)
    return tmp_path


def written(home, *lines):
    file = home / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_the_three_formats(home):
    first, second, third = bench_data.read(written(home, MMSPEC, "", SPEED, VLLM), 9)
    a, b = (str(home / name) for name in ("a.png", "b.png"))
    assert first == bench_data.Prompt("7", "chart", "what is here ?", [a], 1)
    assert second == bench_data.Prompt("q1", "coding", "write a loop", [], 0)
    assert third == bench_data.Prompt("4", "custom_mm", "compare them", [a, b], 0)
    assert len(bench_data.read(written(home, MMSPEC, SPEED, "[broken"), 2)) == 2


REFUSED = {
    "of no format": ({"text": "a"}, "line 2 of .*: got text, expected id, image, turns, category or "),
    "no object": ([1], "line 2 of .*: got list, expected id, "),
    "no JSON": ("{", "line 2 of .*: Expecting property name"),
    "no turns": ({**MMSPEC, "turns": []}, r"line 2 of .*: turns: got \[\], expected a list"),
    "turns of messages": (
        {**SPEED, "turns": [{"role": "user"}]},
        "line 2 of .*: turns: got .*, expected a list of texts",
    ),
    "no text": ({**VLLM, "prompt": None}, "line 2 of .*: prompt: got None, expected a text"),
    "no such image": ({**VLLM, "image_files": ["c.png"]}, r"line 2 of .*: got no file .*c\.png, expected an image"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_is_refused_by_its_number(name, home):
    line, match = REFUSED[name]
    with one_sentence(match):
        bench_data.read(written(home, MMSPEC, line), 9)


def test_an_empty_file_is_refused(home):
    with one_sentence(r"data: got .*data\.jsonl without a line, expected prompts"):
        bench_data.read(written(home, ""), 9)


def test_speed_by_category(home, captioner, capsys):
    asked = [{**MMSPEC, "category": name} for name in ("chart", "photo", "chart")]
    file, out = written(home, *asked, VLLM | {"image_files": ["a.png"]}), home / "out.json"
    few = ["--max-new-tokens", "6", "--json", str(out)]
    assert main(["bench", "caption", "--data", str(file), *few]) == 0
    record = json.loads(out.read_text())
    found = record["categories"]
    assert {name: row["compared"] for name, row in found.items()} == {"chart": 2, "photo": 1, "custom_mm": 1}
    assert all(row["identical"] == row["compared"] and row["tau"] >= 1 for row in found.values())
    assert record["turns_left_out"] == 3 and record["n_prompts"] == 4
    assert "4 prompts by category; 3 later turns are not asked" in " ".join(capsys.readouterr().out.split())
    assert main(["bench", "caption", "--data", str(file), "--batch-size", "2"]) == 2
    assert "data: got --batch-size 2 beside it" in capsys.readouterr().err


def test_texts_alone_and_several_images(home, captioner):
    model, processor = captioner
    data = bench_data.read(written(home, {**SPEED, "turns": ["what is there ?"]}, VLLM), 9)
    images = [[Image.open(path) for path in prompt.images] for prompt in data]
    options = bench_caption.Options(max_new_tokens=4)
    record = bench_caption.bench_caption(model, processor, images, options, "ngram", warmup=1, data=data)
    assert record["identical"] == record["compared"] == 2 and not record["failures"]
    assert record["thumbnails"][0] is None and record["thumbnails"][1]
