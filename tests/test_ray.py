"""Several processes through Ray Data: records once each, deaths of workers, resumes."""

import json
import os
import pickle
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doubles import refused
from tests.tiny_images import scene_files
from visspec.api import distributed, sources
from visspec.api.distributed import Attempts, Job, RayWorker, ReadTask
from visspec.api.loading import load
from visspec.api.sources import Record, seed_of
from visspec.cli.generate import Options, RecordImages
from visspec.cli.main import main
from visspec.presets import write_preset

SHORT = ["--max-new-tokens", "4", "--drafter", "none"]


class Alone(RayWorker):
    """A worker in this process."""

    def _add(self, what, change):
        return self.attempts.add(what, change)


def job(ids, make=None, done=(), group=32) -> Job:
    pytest.importorskip("ray")
    return Job(lambda: map(Record, ids), make, done, os.getcwd(), 1, group=group)


def unpack(table):
    return pickle.loads(table["pickled"][0].as_py())


def test_a_task_reads_each_id_once():
    read = map(unpack, ReadTask(job(["a", "old", "b", "a", "c", "a"], done={"old"}, group=2))(None))
    assert [([r.id for r in records], twice) for records, twice in read] == [(["a", "b"], []), (["c"], ["a", "a"])]
    (odd,) = map(unpack, ReadTask(job(["h\udcffme"]))(None))  # a file name that is not UTF-8
    assert odd == ([Record("h\udcffme")], [])


def test_record_that_kills_workers():

    def make():
        def making(records):
            for record in records:
                if record.id == "b" and record.error is None:
                    raise MemoryError
                yield record.id, record.error

        return making

    attempts, group = Attempts(), distributed.pack(([Record(id) for id in "abc"], ["a"]))
    for _ in range(3):  # the first time all at once, then twice at "b"
        with pytest.raises(MemoryError):
            Alone(job("abc", make), attempts)(group)
    rows, twice = unpack(Alone(job("abc", make), attempts)(group))
    assert (
        rows[0] == ("a", None)
        and "2 workers died at this record" in rows[1][1]
        and rows[2] == ("c", None)
        and twice == ["a"]
    )


def test_a_ray_that_is_too_small(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    for pool, has in (
        ({"workers": 9}, "9 workers need 1 CPU each, but Ray has 4"),
        ({"gpus": 1}, ".* GPU each, but Ray has 0"),
    ):
        with pytest.raises(ValueError, match=f"workers: {has}"):
            distributed.start(replace(job("a"), **pool))


def test_seed_of_record():
    assert seed_of(3, "a") == seed_of(3, "a") and len({seed_of(3, "a"), seed_of(3, "b"), seed_of(4, "a")}) == 3
    assert 0 <= seed_of(0, "") < 2**56 and seed_of(3, "\udcff") != seed_of(3, "\udcfe")


def test_prompts_are_lines_or_objects(tmp_path):
    lines, table = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("a red cube\n\na blue cube\n")
    table.write_text('{"prompt": "a ring", "id": 7}\n{"id": 8}\n{\n')
    assert [(r.id, r.prompt) for r in sources.prompts(lines)] == [
        (f"{lines}:1", "a red cube"), (f"{lines}:3", "a blue cube"),
    ]  # fmt: skip
    ring, *broken = sources.prompts(table)
    assert (ring.id, ring.prompt) == ("7", "a ring") and all("without a prompt" in r.error for r in broken)
    with pytest.raises(ValueError, match="got no such file"):
        sources.prompts(tmp_path / "none")


def test_bad_prompt_is_error_record(folder):
    prompts = {"a": "a ring", "long": "ring " * 500, "odd": "a \ud800"}
    records = [*(Record(id, prompt=text) for id, text in prompts.items()), Record("none", error="none: no prompt")]
    drawing = RecordImages(Options(prompt=[], model=str(folder), batch_size=2, temperature=1.0, seed=5))
    result = {row["id"]: row for row in drawing(records)}
    assert set(result["a"]) == set(result["long"]) and result["none"]["error"] == "none: no prompt"
    assert result["long"]["error"].startswith("long: ") and result["long"]["image"] is None
    assert result["odd"]["error"] == "odd: prompt: got 'a \\ud800', expected a text that UTF-8 can encode."
    alone = next(iter(drawing(records[:1])))
    assert alone["image"] == result["a"]["image"] and alone["error"] is None and alone["seed"] == seed_of(5, "a")


def test_a_run_goes_on_with_and_without_ray(tmp_path, capsys, monkeypatch):
    """Both write the same settings, also of a preset of a file, and the same records."""

    def here(read, make, *, done, repeated, **pool):
        yield from make()(sources.new_records(read(), done, repeated))

    monkeypatch.setattr(distributed, "run", here)
    preset, images, result = tmp_path / "p.json", scene_files(tmp_path, 4), []
    model, _ = load("captioner")
    write_preset(preset, model, {"drafter": "ngram", "acceptance": "typical:epsilon=0.1"})
    for count, name, ways in ((2, "a", ["--ray"]), (2, "b", []), (4, "a", []), (4, "b", ["--ray"])):
        out = tmp_path / f"{name}.jsonl"
        argv = ["caption", *images[:count], "--out", str(out), "--preset", str(preset), *ways]
        assert main([*argv, "--max-new-tokens", "4"]) == 0
        assert "2 records, 0 of them failed" in capsys.readouterr().out
        about = json.loads(Path(f"{out}.about.json").read_text())
        assert about.pop("provenance")["torch"] and about["guarantee"] == "approximate"
        result.append((about, captions(out)))
    assert result[0] == result[1] and result[2] == result[3] and len(result[2][1]) == 4


# --- a real Ray: it takes tens of seconds to start processes ----------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """A Ray that the commands of this module connect to."""
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'visspec[ray]')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        result = ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
        patch.setenv("RAY_ADDRESS", result.address_info["address"])
        yield
        ray.shutdown()


def captions(path: Path) -> dict[str, dict]:
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


@pytest.mark.slow
def test_killed_workers_lose_nothing(cluster):
    repeated = []

    def make():
        distributed.DEATHS = 1  # in the worker: each death costs a new process

        def making(records):
            for record in records:
                if record.id == "r13" and record.error is None:  # a record that kills every worker
                    os.kill(os.getpid(), signal.SIGKILL)
                yield record.id, record.error

        return making

    ids = [f"r{i:02}" for i in range(20)]
    read = lambda: map(Record, [*ids, "r01", "r01"])  # noqa: E731
    result = list(distributed.run(read, make, workers=2, group=4, done={"r00"}, repeated=repeated.append))
    assert sorted(id for id, _ in result) == ids[1:] and repeated == ["r01", "r01"]
    assert [id for id, error in result if error] == ["r13"]

    def broken():
        raise ValueError("model: got none, expected one")

    with pytest.raises(ValueError, match=r"^model: got none, expected one$"):
        list(distributed.run(read, broken, workers=1))


@pytest.mark.slow
def test_captions_of_two_processes(cluster, tmp_path, capsys):
    """The same records, exit codes and counts of ids that come twice."""
    home, table = tmp_path / "images", tmp_path / "t.jsonl"
    home.mkdir()
    scene_files(home, 6)
    (home / "6.png").write_bytes(b"broken")
    again = [{"id": "a", "image": "images/0.png"}] * 3 + [{"id": str(home / "1.png"), "image": "images/1.png"}]
    table.write_text("\n".join(map(json.dumps, again)))
    result = []
    for name, options in (("one", []), ("two", ["--ray", "--workers", "2", "--slots", "1"])):
        out = tmp_path / f"{name}.jsonl"
        argv = ["caption", str(home), str(table), "--out", str(out), "--temperature", "0.9", "--seed", "3", *SHORT]
        argv += options
        assert main(argv) == 1
        message = capsys.readouterr()
        assert "8 records, 1 of them failed, 3 repeated ids" in message.out
        assert Counter(line for line in message.err.splitlines() if "twice" in line).total() == 3
        result.append(captions(out))
    for rows in zip(*(sorted(rows.values(), key=lambda row: row["id"]) for rows in result), strict=True):
        assert rows[0] | {"rounds": 0} == rows[1] | {"rounds": 0}
    assert main([arg for arg in argv if arg != "--ray"]) == 1  # goes on here
    assert "0 records, 0 of them failed, 8 were there" in capsys.readouterr().out
    assert "records made with" in refused(capsys, *argv, "--prompt", "other")


@pytest.mark.nightly
def test_images_of_two_processes(cluster, folder, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["generate", "a ring", "a cube", "-n", "2", "--ray", "--batch-size", "1", "--out", str(out), "--seed", "5"]
    for message in ("4 records, 0 of them failed;", "0 records, 0 of them failed, 4 were there\n"):
        assert main([*argv, "--model", str(folder)]) == 0 and message in capsys.readouterr().out
    records = [Record(f"{text}#{k}", prompt=text) for text in ("a ring", "a cube") for k in range(2)]
    drawing = RecordImages(Options(prompt=[], model=str(folder), batch_size=1, seed=5))  # pixels round by batch size
    for row, found in zip(drawing(records), map(captions(out / "images.jsonl").get, (r.id for r in records))):
        assert (out / found["image"]).read_bytes() == row["image"] and found | {"image": None} == row | {"image": None}
    read = list(sources.records([out / "images.jsonl"]))  # for `visspec caption`
    assert sorted(record.id for record in read) == sorted(record.id for record in records)
    assert all(Path(record.image).is_file() and record.prompt for record in read)
