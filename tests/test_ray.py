"""Several processes through Ray Data: shards, claims, deaths of workers, resumes; a real local Ray in the slow ones."""

import json
import os
import shutil
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.test_cli import refused
from visspec.api import distributed, sources
from visspec.api.distributed import Claims, RayWorker, WorkerPool, groups
from visspec.api.shards import Shards
from visspec.api.sources import Record, seed_of
from visspec.cli import ray_shards
from visspec.cli.main import main
from visspec.io import included

COLUMNS = {"id": "string", "text": "string", "error": "string"}
SHORT = ["--max-new-tokens", "4", "--drafter", "none"]


def loud():
    """What makes a record's text its id in capitals."""
    return lambda records: ({"id": r.id, "text": r.id.upper(), "error": r.error} for r in records)


class Alone(RayWorker):
    """A worker in this process."""

    def _ask(self, what, *values):
        return getattr(self.claims, what)(*values)


@pytest.fixture()
def shards(tmp_path):
    pytest.importorskip("pyarrow")
    return Shards(tmp_path / "out", COLUMNS)


def test_a_shard_is_named_after_its_ids_and_made_once(shards, monkeypatch):
    made = []

    def make():
        return lambda records: (made.append(r.id) or {"id": r.id, "text": "x", "error": None} for r in records)

    with shards.lock({"a": 1}), pytest.raises(ValueError, match="another run is writing"):
        shards.lock({"a": 1})
    with shards.lock({"a": 1}):
        worker = Alone(make, shards, Claims(set()), WorkerPool(), os.getcwd())
        records = [Record("b"), Record("a")]
        first, again = worker.write(records), worker.write(records[::-1])
    assert made == ["b", "a"] and first["shard"] == again["shard"] and shards.ids() == {"a", "b"}
    assert [path.name for path in shards.folder.glob("*.parquet")] == [first["shard"]]
    with pytest.raises(ValueError, match="got a 2 and records made with 1"):
        shards.lock({"a": 2})
    (shards.folder / first["shard"]).write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match="got a shard that can't be read"):
        shards.ids()


def test_an_id_is_made_once_whoever_reads_it_and_however_often():
    claims = Claims({"old"})
    read = [Record(id) for id in ("a", "old", "b", "a", "c")]

    def ids(reader):
        found = groups(lambda: iter(read), lambda first, ids: claims.claim(reader, first, ids), 2)
        return [[r.id for r in some] for some in found]

    assert ids(0) == [["a", "b"], ["c"]] and ids(0) == [["a", "b"], ["c"]]  # a task that runs again gets its own again
    assert ids(1) == [] and claims.doubles() == ["a", "old", "b", "c"]


def test_records_travel_as_tables():
    pytest.importorskip("pyarrow")
    records = [Record("a", Path("x/a.png")), Record("b", b"\x00bytes\x00", "what ?"), Record("c\udcff", error="gone")]
    (row,) = distributed.pack_records(records).to_pylist()
    assert distributed.unpack_records(row) == records


def test_ids_that_are_no_text_are_known_again(shards):
    """Ids of file names that are not UTF-8; two lists of ids are not one name of a shard."""
    worker, ids = Alone(loud, shards, Claims(set()), WorkerPool(), os.getcwd()), ["h\udcffme", "\ud800", "a\nb"]
    shards.folder.mkdir()
    worker.write([Record(id) for id in ids])
    assert shards.ids() == {"h\\udcffme", "\\ud800", "a\nb"}
    assert Claims(shards.ids()).claim(0, 0, [*ids, "new"]) == [False] * 3 + [True]
    assert shards.path(["a\nb"]) != shards.path(["a", "b"])
    utils = Namespace(get_entrypoint_name=lambda: "visspec caption \udcff.png")  # what Ray sends as UTF-8
    distributed._name_in_utf8(utils)
    assert utils.get_entrypoint_name() == "visspec caption \\udcff.png"


def test_the_exit_code_of_shards_is_that_of_all_records(shards, monkeypatch, capsys):
    """As of lines: resumed as the first time, --retry-failed makes what failed, a folder that is gone is named."""
    broken, made = {"b", "c"}, []

    def make():
        def making(records):
            for record in records:
                made.append(record.id)
                yield {"id": record.id, "text": "x", "error": "broken" if record.id in broken else None}

        return making

    def run(readers, make, shards, *, pool, size, complain):
        claims = Claims(shards.ids())
        worker = Alone(make, shards, claims, pool, os.getcwd())
        for records in groups(readers[0], lambda first, ids: claims.claim(0, first, ids), size):
            yield worker.write(records)
        for id in claims.doubles():
            complain(f"{id}: got this id twice")

    def code(ids, retry=False):
        made.clear()
        given = Namespace(retry_failed=retry, device="cpu", workers=1, threads=1, shard=2)
        return ray_shards.write([lambda: map(Record, ids)], make, shards, {}, given), "".join(made)

    monkeypatch.setattr(distributed, "run", run)
    assert code("abcde") == (1, "abcde") and code("abcde") == (1, "") and code("b", retry=True) == (1, "b")
    assert "0 records, 0 of them failed, 5 were there (2 of these failed, --retry-failed" in capsys.readouterr().out
    assert code("abcde") == (1, "c") and code("abcde", retry=True) == (1, "bc") and shards.failed() == {"b", "c"}
    broken.clear()
    assert code("abcde", retry=True) == (0, "bc") and sorted(row["id"] for row in shards.read()) == list("abcde")
    assert code("aa") == (1, "") and "1 ids came twice" in capsys.readouterr().out  # named, and no failure of "a"
    monkeypatch.setattr(Shards, "write", lambda shards, rows: shutil.rmtree(shards.folder))
    with pytest.raises(ValueError, match=r"\.lock: was removed during the run"):
        code("f")


def test_the_record_that_kills_workers_is_found_and_the_others_are_made(shards):
    class Died(Exception):
        pass

    def make():
        def making(records):
            for record in records:
                if record.id == "b" and record.error is None:
                    raise Died
                yield from loud()([record])

        return making

    shards.folder.mkdir()
    claims, records = Claims(set()), [Record(id) for id in "abc"]
    for _ in range(3):  # the first time all at once, then twice at "b"
        with pytest.raises(Died):
            Alone(make, shards, claims, WorkerPool(), os.getcwd()).write(records)
    told = Alone(make, shards, claims, WorkerPool(), os.getcwd()).write(records)
    found = {row["id"]: row for row in shards.read()}
    assert found["a"]["text"] == "A" and found["c"]["error"] is None and "2 workers died at it" in found["b"]["error"]
    assert told["errors"] == [found["b"]["error"]]


def test_workers_that_die_while_they_load_are_a_sentence(shards):
    claims = Claims(set())

    def make():
        raise MemoryError

    for _ in range(2 + 2):
        with pytest.raises(MemoryError):
            Alone(make, shards, claims, WorkerPool(2), os.getcwd())
    with pytest.raises(ValueError, match="workers died while they loaded the model"):
        Alone(make, shards, claims, WorkerPool(2), os.getcwd())


def test_a_worker_has_the_threads_of_its_pool(shards):
    Alone(loud, shards, Claims(set()), WorkerPool(threads=3), os.getcwd())
    assert torch.get_num_threads() == 3


def test_the_seed_of_a_record_follows_from_its_id():
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


@pytest.mark.parametrize(
    "argv, words",
    [
        (["caption", "IMAGE", "--ray"], "--out: got none, expected a folder"),
        (["caption", "IMAGE", "--ray", "--out", "TMP/x.jsonl"], "expected a folder for shards"),
        (["caption", "IMAGE", "--ray", "--out", "TMP/x", "--report", "TMP/r.html"], "--report: got one beside --ray"),
        (["caption", "IMAGE", "--ray", "--out", "IMAGE"], "is a file, expected a folder"),
        (["caption", "IMAGE", "--ray", "--out", "TMP/x"], "ray is not installed, expected it (pip install"),
        (["generate", "a ring", "--ray", "--out", "TMP/x"], "ray is not installed, expected it (pip install"),
        (["generate", "a ring", "--ray", "--out", "TMP/x", "--grid", "TMP/g.png"], "--grid: got one beside --ray"),
        (["generate", "a ring", "--ray", "--out", "TMP/x", "--image", "TMP/g.png"], "--image: got one beside --ray"),
        (["generate", "--out", "TMP/x"], "prompt: got none"),
        (["generate", "a ring", "--retry-failed", "--out", "TMP/x"], "--retry-failed: got it without --ray"),
        (["generate", "--prompts", "TMP/none", "--out", "TMP/x"], "got no such file"),
    ],
)
def test_bad_input_is_a_sentence(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    image = tmp_path / "i.png"
    included.scenes("shapes").images(1)[0].save(image)
    argv = [a.replace("IMAGE", str(image)).replace("TMP", str(tmp_path)) for a in argv]
    assert words in refused(capsys, *argv)


def test_a_prompt_that_cannot_be_drawn_is_an_error_record(pipe):
    from visspec.cli.generate_ray import COLUMNS, RecordImages

    records = [
        Record("a", prompt="a ring"),
        Record("long", prompt="ring " * 500),
        Record("odd", prompt="a \ud800"),
        Record("none", error="none: no prompt"),
    ]
    drawing = RecordImages(pipe, {"batch_size": 2, "temperature": 1.0}, seed=5)
    found = {row["id"]: row for row in drawing(records)}
    assert set(found["a"]) == set(COLUMNS) and found["none"]["error"] == "none: no prompt"
    assert found["long"]["error"].startswith("long: ") and found["long"]["image"] is None
    assert found["odd"]["error"] == "odd: prompt: got 'a \\ud800', expected a text that UTF-8 can hold"
    alone = next(iter(drawing(records[:1])))
    assert alone["image"] == found["a"]["image"] and alone["error"] is None and alone["seed"] == seed_of(5, "a")


# --- a real local Ray: it takes tens of seconds to start processes -------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'visspec[ray]')")
    with distributed.cluster(WorkerPool(workers=3)):
        yield ray


@pytest.mark.slow
def test_workers_that_are_killed_lose_nothing(cluster, tmp_path):
    shards, marks = Shards(tmp_path / "out", COLUMNS), tmp_path / "marks"
    marks.mkdir()

    def make():
        def making(records):
            for record in records:
                once = marks / record.id
                if record.id == "r05" and not once.exists():  # a worker is killed in the middle
                    once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if record.id == "r13" and record.error is None:  # a record that kills every worker
                    os.kill(os.getpid(), signal.SIGKILL)
                yield {"id": record.id, "text": record.id.upper(), "error": record.error}

        return making

    ids, complaints = [f"r{i:02}" for i in range(20)], []
    readers = [lambda: map(Record, ids), lambda: map(Record, ids[:2])]
    with shards.lock({}):
        told = list(distributed.run(readers, make, shards, pool=WorkerPool(2), size=4, complain=complaints.append))
    found = {row["id"]: row for row in shards.read()}
    assert len(list(shards.read(["id"]))) == 20 and sorted(found) == ids and sum(t["records"] for t in told) == 20
    assert [id for id, row in found.items() if row["error"]] == ["r13"] and found["r05"]["text"] == "R05"
    assert sorted(complaints) == [f"r0{i}: got this id twice, expected one record of each" for i in (0, 1)]
    with shards.lock({}):
        assert list(distributed.run([lambda: map(Record, ids)], make, shards, pool=WorkerPool(1))) == []

    def broken():
        raise ValueError("model: got none, expected one")

    with shards.lock({}), pytest.raises(ValueError, match="model: got none, expected one"):
        list(distributed.run([lambda: map(Record, ["new"])], broken, shards, pool=WorkerPool(1)))
    with pytest.raises(ValueError, match="workers: got 9 of 1 CPU each, expected at most"):
        list(distributed.run(readers, make, shards, pool=WorkerPool(9)))


@pytest.mark.slow
def test_captions_of_two_processes_are_those_of_one(cluster, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    home, lines, out = tmp_path / "images", tmp_path / "c.jsonl", tmp_path / "out"
    home.mkdir()
    for i, image in enumerate(included.scenes("shapes").images(6)):
        image.save(home / f"{i}.png")
    (home / "6.png").write_bytes(b"broken")
    sampled = ["--temperature", "0.9", "--seed", "3", *SHORT]
    assert main(["caption", str(home), "--out", str(lines), *sampled]) == 1
    expected = {row["id"]: row for row in map(json.loads, Path(lines).read_text().splitlines())}
    argv = ["caption", str(home), "--ray", "--workers", "2", "--shard", "2", "--out", str(out), *sampled]
    assert main(argv) == 1
    found = {row["id"]: row for row in Shards(out, {}).read()}
    for row in found.values():
        assert row | {"rounds": 0} == expected[row["id"]] | {"rounds": 0}
    assert len(found) == 7 and found[str(home / "6.png")]["error"]
    whole = (path for path in out.glob("part-*") if not any(parquet.read_table(path)["error"].to_pylist()))
    next(whole).unlink()
    argv[argv.index("--workers") + 1] = "1"
    assert main(argv) == 1 and {row["id"] for row in Shards(out, {}).read()} == set(expected)  # one failed before
    assert "of them failed" in capsys.readouterr().out
    assert "records made with" in refused(capsys, *argv, "--prompt", "other")


@pytest.mark.nightly
def test_images_of_two_processes_are_those_of_one(cluster, pipe, folder, tmp_path):
    from visspec.cli.generate_ray import RecordImages

    out = tmp_path / "out"
    argv = ["generate", "a ring", "a cube", "-n", "2", "--ray", "--shard", "1", "--out", str(out), "--seed", "5"]
    assert main([*argv, "--model", str(folder)]) == 0
    found = {row["id"]: row["image"] for row in Shards(out, {}).read()}
    records = [Record(f"{text}#{k}", prompt=text) for text in ("a ring", "a cube") for k in range(2)]
    drawing = RecordImages(pipe, {"batch_size": 1}, 5)  # pixels round by the size of a batch
    assert found == {row["id"]: row["image"] for row in drawing(records)}
