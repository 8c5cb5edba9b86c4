"""`visspec bench captions`: what it measures is there, all arms say the same, and prompts are what the share says."""

import json

from tests.test_cli import refused
from visspec.cli import bench_prefix
from visspec.cli.bench_captions import ratio, scene_questions
from visspec.cli.main import main
from visspec.io import included


def test_it_writes_what_it_measured(tmp_path, capsys):
    out = tmp_path / "c.json"
    argv = ["bench", "captions", "--images", "5", "--slots", "2", "--passes", "1", "--max-new-tokens", "24"]
    assert main([*argv, "--share", "0.5", "--json", str(out)]) in (0, None)
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == ["stream", "fixed_batches", "transformers_sorted"]
    assert all(row["identical_to_stream"] == 5 and row["images_per_second"] > 0 for row in found["rows"])
    assert found["identical"] == found["compared"] == 5 and found["lengths"][2] == 24 and found["share"] == 0.5
    assert "identical to alone: 5/5" in capsys.readouterr().out
    assert "--share: got 2" in refused(capsys, *argv, "--share", "2")


def test_a_share_of_the_prompts_asks_for_a_description():
    scenes = included.scenes().questions(200)
    found = scene_questions(scenes, "describe .", 0.25)
    assert found == scene_questions(scenes, "describe .", 0.25) and 30 < found.count("describe .") < 70
    assert scene_questions(scenes[:3], "describe .", 1.0) == ["describe ."] * 3
    assert "describe ." not in scene_questions(scenes, "describe .", 0.0)
    assert ratio([2.0, 6.0, 4.0], [1.0, 2.0, 2.0]) == 2.0


def test_the_bench_compares_the_same_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_prefix, "SIDE", 16)
    record = tmp_path / "prefix.json"
    few = ["--images", "1", "--questions", "2", "--passes", "1", "--max-new-tokens", "4", "--json", str(record)]
    assert main(["bench", "prefix", *few]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [(row["slots"], row["questions"], row["identical"], row["compared"]) for row in rows] == [
        (36, 2, 2, 2),
        (16, 2, 4, 4),
    ]
    assert all(row["over_fresh"] > 0 and row["peak_mb"] > 0 for row in rows)
