"""`visspec bench caption`: image files, prompts of published benchmarks, several drafters, and a stream."""

import json
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from tests.doubles import raises_line
from visspec.api.sources import Record
from visspec.cli import bench_caption, bench_data
from visspec.cli.main import main

MMSPEC = {"id": 7, "image": "a.png", "turns": ["what is here ?", "and there ?"], "category": "chart"}
SPEED = {"question_id": "q1", "category": "coding", "sub_category": "x", "turns": ["write a loop"], "multiturn": False}
VLLM = {"prompt": "compare them", "image_files": ["a.png", "b.png"]}


@pytest.fixture
def home(tmp_path, short_bench):
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (96, 96), colour).save(tmp_path / name)
    return tmp_path


def written(home, *lines):
    file = home / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def measured(home, *more, limit="6"):
    record = home / "out.json"
    assert main(["bench", "caption", *map(str, more), "--max-new-tokens", limit, "--json", str(record)]) == 0
    return json.loads(record.read_text())


def test_three_formats(home):
    first, second, third = bench_data.read(file := written(home, MMSPEC, "", SPEED, VLLM), 9)
    assert first == Record(f"{file}:1", [home / "a.png"], "what is here ?", category="chart")
    assert second == Record(f"{file}:3", [], "write a loop", category="coding")
    assert third == Record(f"{file}:4", [home / "a.png", home / "b.png"], "compare them", category="custom_mm")
    assert len(bench_data.read(written(home, MMSPEC, SPEED, "[broken"), 2)) == 2


@pytest.mark.parametrize(
    "line",
    [{"text": "a"}, [1], "{", {**MMSPEC, "turns": []}, {**SPEED, "turns": [{"role": "user"}]}, {**VLLM, "prompt": 3}],
)
def test_another_format_is_refused_by_line(home, line):
    with raises_line(r"line 2 of .*data\.jsonl is not a prompt of MMSpec, SPEED-Bench or vLLM's custom_mm \("):
        bench_data.read(written(home, MMSPEC, line), 9)


def test_an_empty_file_is_refused(home):
    with raises_line(r"data: .*data\.jsonl is empty"):
        bench_data.read(written(home, ""), 9)


def test_speed_by_category(home, captioner, capsys):
    asked = [{**MMSPEC, "category": name} for name in ("chart", "photo", "chart")]
    file = written(home, *asked, VLLM | {"image_files": ["a.png"]})
    record = measured(home, "--data", file)
    result = record["categories"]
    assert {name: row["compared"] for name, row in result.items()} == {"chart": 2, "photo": 1, "custom_mm": 1}
    assert all(row["identical"] == row["compared"] and row["tau"] >= 1 for row in result.values())
    assert record["n_prompts"] == 4 and "prompts by category" in capsys.readouterr().out
    assert main(["bench", "caption", "--data", str(file), "--batch-size", "2"]) == 2
    assert "data: --batch-size above 1 can't be combined with --data" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["folder", "lines"])
def test_photos_by_category(source, home):
    """Subfolders of a folder, or `kind` or `category` of its lines, in turns: two images are one of each."""
    for name in ("cats/1.png", "cats/2.png", "dogs/1.png"):
        (home / name).parent.mkdir(exist_ok=True)
        shutil.copy(home / "a.png", home / name)
    for name in ("a.png", "b.png"):
        (home / name).unlink()
    kinds = {"cats/1.png": {"kind": "cats"}, "cats/2.png": {"category": "cats"}, "dogs/1.png": {"kind": "dogs"}}
    lines = written(home, *({"image": name, "prompt": "what is here ?", **kind} for name, kind in kinds.items()))
    record = measured(home, "--images", home if source == "folder" else lines, "--count", 2)
    assert {name: row["compared"] for name, row in record["categories"].items()} == {"cats": 1, "dogs": 1}


def test_texts_alone_and_several_images(home, captioner):
    model, processor = captioner
    data = bench_data.read(written(home, {**SPEED, "turns": ["what is there ?"]}, VLLM), 9)
    prompts = [replace(record, image=[Image.open(path) for path in record.image]) for record in data]
    options = bench_caption.Options(max_new_tokens=4, drafter=["ngram"])
    record = bench_caption.bench_prompts("caption", model, processor, prompts, prompts[:1], options)
    assert record["identical"] == record["compared"] == 2 and not record["failures"]
    assert record["thumbnails"][0] is None and record["thumbnails"][1]


def test_several_drafters_and_a_stream(home, captioner, capsys):
    """Images of a folder, one of which can't be read; the fields at the top are those of the first drafter."""
    (home / "c.png").write_bytes(b"broken")
    more = ["--drafter", "ngram", "context", "none", "--batch-size", "2", "--stream"]
    record = measured(home, "--images", home, *more)
    assert [row["drafter"] for row in record["rows"]] == ["ngram", "context", "none"]
    assert all(row["identical"] == row["compared"] == 1 for row in record["rows"]) and record["n_prompts"] == 2
    assert {name: record[name] for name in record["rows"][0]} == record["rows"][0]
    assert "plain" in record["baselines"] and not any(name.startswith("ours") for name in record["baselines"])
    assert record["items_per_second"] > 0 and record["over_transformers"] > 0
    message = capsys.readouterr()
    assert "c.png" in message.err and "prompts / s" in message.out and "context" in message.out
