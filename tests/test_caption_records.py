"""`visspec caption --out`: folders, tables and shards; kills, resumes, corrupt files, bad input in one sentence."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.test_cli import refused
from visspec.api import sources, zoo
from visspec.api.captions import prefetched
from visspec.cli.main import main
from visspec.eval.world.render import to_image
from visspec.eval.world.scene import held_out_scenes
from visspec.files import Journal

SHORT = ["--max-new-tokens", "4", "--drafter", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("images")
    (home / "deep" / "er").mkdir(parents=True)
    for i, scene in enumerate(held_out_scenes(4)):
        to_image(scene).save(home / ["", "deep", "deep/er", ""][i] / f"scene{i}.png")
    return home


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_folder_is_captioned_once_and_goes_on_where_it_ended(folder, tmp_path, capsys):
    out, page = tmp_path / "c.jsonl", tmp_path / "page.html"
    argv = ["caption", str(folder), "--out", str(out), "--report", str(page), *SHORT]
    assert main(argv) == 0
    found = lines(out)
    assert len(found) == 4 and all(r["caption"] and r["ended"] == "length" and r["tokens"] == 4 for r in found)
    assert sorted(r["id"] for r in found) == sorted(str(p) for p in folder.rglob("*.png"))
    text = page.read_text()
    assert text.count("data:image/") == 4 and "4 records, 0 failed" in text and found[0]["id"] in text
    with open(out, "ab") as file:
        file.write(b'{"id": "torn')
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[1:]))
    assert main(argv) == 0
    assert sorted(map(str, lines(out))) == sorted(map(str, found))
    assert "1 records, 0 of them failed, 3 were there" in capsys.readouterr().out
    assert "prompt 'other'" in refused(capsys, *argv, "--prompt", "other")


def test_captions_are_those_of_generate(folder, tmp_path):
    out, record = tmp_path / "c.jsonl", tmp_path / "c.json"
    files = sorted(map(str, folder.rglob("*.png")))
    assert main(["caption", *files, "--json", str(record), "--max-new-tokens", "20"]) == 0
    assert main(["caption", str(folder), "--out", str(out), "--max-new-tokens", "20", "--slots", "2"]) == 0
    expected = {r["path"]: r["caption"] for r in json.loads(record.read_text())["results"]}
    assert {r["id"]: r["caption"] for r in lines(out)} == expected


def test_globs_lines_and_shards(folder, tmp_path, capsys):
    image = str(folder / "scene0.png")
    table, shard = tmp_path / "t.jsonl", tmp_path / "shard-0.tar"
    entries = [
        {"image": image, "id": "a", "prompt": "what is the ground like ?"},
        {"id": "b"},
        {"image": image, "id": "a"},
    ]
    table.write_text(
        "\n".join([json.dumps(e) for e in entries] + ["{", "7", "", json.dumps({"image": "gone.png", "id": 5})])
    )
    with tarfile.open(shard, "w") as file:
        for name, data in (
            ("x/one.png", Path(image).read_bytes()), ("x/one.json", b'{"prompt": "how many shapes are there ?"}'),
            ("x/two.json", b"{}"), ("three.png", b"no image"), ("four.png", Path(image).read_bytes()),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    out = tmp_path / "out.jsonl"
    assert main(["caption", str(folder / "**" / "*.png"), str(table), str(shard), "--out", str(out), *SHORT]) == 1
    found = {r["id"]: r for r in lines(out)}
    assert len(lines(out)) == len(found) == 4 + 5 + 4
    assert found["a"]["caption"] and found["a"]["prompt"] == "what is the ground like ?"
    assert found["shard-0.tar/x/one"]["caption"] and found["shard-0.tar/four"]["caption"]
    assert "got no image" in found["b"]["error"] and "got no image" in found["shard-0.tar/x/two"]["error"]
    assert "no JSON" in found[f"{table}:4"]["error"] and "got int" in found[f"{table}:5"]["error"]
    assert "gone.png" in found["5"]["error"] and "not a readable" in found["shard-0.tar/three"]["error"]
    assert "a: got this id twice" in capsys.readouterr().err


def test_a_torn_shard_gives_its_whole_records_and_an_error(folder, tmp_path):
    shard = tmp_path / "s.tar"
    with tarfile.open(shard, "w") as file:
        for i in range(3):
            file.add(folder / "scene0.png", f"{i}.png")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    found = list(sources.records([shard]))
    assert [r.id for r in found if r.error is None][:1] == ["s.tar/0"] and "can't be read behind" in found[-1].error
    assert found[-1].id == str(shard)


def test_parquet_in_and_out(folder, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    image = folder / "scene0.png"
    table, out = tmp_path / "t.parquet", tmp_path / "o.parquet"
    rows = [
        {"id": "a", "image": {"bytes": image.read_bytes(), "path": None}},
        {"id": "b", "image": {"bytes": None, "path": str(image)}},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), table)
    argv = ["caption", str(table), "--out", str(out), *SHORT]
    assert main(argv) == 0 and main(["caption", str(folder / "deep"), *argv[1:]]) == 0
    found = parquet.read_table(out).to_pylist()
    assert [r["id"] for r in found][:2] in (["a", "b"], ["b", "a"]) and len(found) == 4
    assert found[0]["caption"] == found[1]["caption"] and found[0]["error"] is None
    table.write_bytes(table.read_bytes()[:-20])
    (broken,) = sources.records([table])
    assert "can't be read behind row 0" in broken.error


def test_datasets(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    files = sorted(map(str, folder.rglob("*.png")))[:2]
    table = datasets.table.InMemoryTable.from_pydict({"image": files, "id": ["a", "b"]})
    found = datasets.Dataset(table, fingerprint="two")
    found.save_to_disk(tmp_path / "set")
    assert [(r.id, r.error) for r in sources.records([tmp_path / "set"])] == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["FOLDER"], "--out: got none"),
        (["FOLDER", "--out", "x.csv"], "expected a file that ends in .jsonl or .parquet"),
        (["FOLDER", "--out", "TMP/x.jsonl", "--json", "TMP/y.json"], "--json: got"),
        (["TMP/none.jsonl", "--out", "TMP/x.jsonl"], "got no such file"),
        (["TMP/*.png", "--out", "TMP/x.jsonl"], "got no image"),
        (["TMP", "--out", "TMP/x.jsonl"], "holds no image"),
        (["FOLDER", "--out", "FOLDER"], "is a folder, expected a file"),
        (["FOLDER/scene0.png", "--report", "TMP/r.html"], "--report: got"),
        (["hf:nothing", "--out", "TMP/x.jsonl"], "datasets is not installed"),
        (["FOLDER", "--out", "TMP/x.parquet"], "pyarrow is not installed"),
    ],
)
def test_bad_input_is_a_sentence(argv, words, folder, tmp_path, capsys, monkeypatch):
    for package in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    argv = [a.replace("FOLDER", str(folder)).replace("TMP", str(tmp_path)) for a in argv]
    assert words in refused(capsys, "caption", *argv)


def test_a_prompt_beyond_the_context_is_an_error_record(folder, tmp_path):
    out, table = tmp_path / "o.jsonl", tmp_path / "t.jsonl"
    long = {"image": str(folder / "scene0.png"), "id": "long", "prompt": "the " * 5000}
    table.write_text(json.dumps(long) + "\n" + json.dumps(long | {"id": "short", "prompt": None}))
    assert main(["caption", str(table), "--out", str(out), *SHORT]) == 1
    found = {r["id"]: r for r in lines(out)}
    assert "the model's context" in found["long"]["error"] and found["short"]["caption"]


def test_a_journal_belongs_to_one_run_and_one_setting(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, {"a": (1, 2)}) as journal:
        journal.add({"id": "x"})
        with pytest.raises(ValueError, match="another run is writing"), Journal(path, {"a": (1, 2)}):
            pass
    with Journal(path, {"a": [1, 2]}) as again:
        assert again.done == {"x"} and list(again) == [{"id": "x"}]
    with pytest.raises(ValueError, match="got a 3 and records made with"), Journal(path, {"a": 3}):
        pass
    path.write_text("no record\n")
    with pytest.raises(ValueError, match="got line 1, expected a JSON object with an id"), Journal(path, {"a": [1, 2]}):
        pass
    assert path.read_text() == "no record\n"


def test_a_full_disk_loses_no_record(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, {}) as journal:
        journal.add({"id": "x"})
        room, journal._file = journal._file, open("/dev/full", "ab")
        with pytest.raises(OSError, match="No space"):
            journal.add({"id": "y"})
        journal._file = room
    with Journal(path, {}) as again:
        assert again.done == {"x"}


def test_prefetching_keeps_the_order_and_looks_ahead_so_far():
    read = []

    def given():
        for i in range(20):
            read.append(i)
            yield i

    made = prefetched(lambda i: i * i, given(), 3, 4)
    assert [next(made) for _ in range(3)] == [0, 1, 4] and len(read) <= 7
    made.close()


def started(argv) -> subprocess.Popen:
    """A command in a process of its own."""
    command = [sys.executable, "-P", "-m", "visspec.cli.main", *argv]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)


def count_of(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def killed(argv, out: Path, at: int) -> None:
    """Run a command and kill it when its file has so many lines."""
    process = started(argv)
    while process.poll() is None:
        if count_of(out) >= at:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.01)


def watched(argv, out: Path) -> tuple[int, list[tuple[int, int]]]:
    """Run a command to its end. Returns its code, and (lines, resident kB) from time to time."""
    process, seen = started(argv), []
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        if status.exists() and (found := re.search(r"VmRSS:\s+(\d+) kB", status.read_text())):
            seen.append((count_of(out), int(found[1])))
        time.sleep(0.1)
    return process.returncode, seen


def many(home: Path, count: int, corrupt: int) -> None:
    """A folder of images, every `corrupt`-th of them broken."""
    kinds = []
    for scene in held_out_scenes(5):
        to_image(scene).save(buffer := io.BytesIO(), "PNG")
        kinds.append(buffer.getvalue())
    for i in range(count):
        broken = i % corrupt == corrupt - 1
        (home / f"{i:05}.png").write_bytes(b"\x89PNG broken" if broken else kinds[i % len(kinds)])


def check_kills(tmp_path, count: int, corrupt: int, kills: list[int], *options: str) -> list[tuple[int, int]]:
    """Kill runs at these numbers of records, and look at what is there in the end. Returns the last run's memory."""
    home, out = tmp_path / "images", tmp_path / "o.jsonl"
    home.mkdir()
    many(home, count, corrupt)
    argv = ["caption", str(home), "--out", str(out), *SHORT, *options]
    before: list[bytes] = []
    for at in kills:
        killed(argv, out, at)
        now = out.read_bytes().splitlines(keepends=True)
        assert now[: len(before)] == before  # finished records stay as they are
        before = [line for line in now if line.endswith(b"\n")]
    assert len(before) < count
    named = sum(json.loads(line)["error"] is not None for line in before)
    code, seen = watched(argv, out)
    assert code == int(named < count // corrupt)  # 1 where this run met a broken file
    found = lines(out)
    assert [line.encode() for line in out.read_text().splitlines(keepends=True)][: len(before)] == before
    assert len(found) == len({r["id"] for r in found}) == count
    assert sum(r["error"] is not None for r in found) == count // corrupt
    assert all("broken or truncated" in r["error"] or "not a readable" in r["error"] for r in found if r["error"])
    return seen


def test_kills_lose_no_record_and_repeat_none(tmp_path):
    check_kills(tmp_path, 40, 8, [4])


@pytest.fixture(scope="module")
def little(tmp_path_factory) -> Path:
    """A random model of the captioner's kind, small enough for thousands of images."""
    from transformers import AutoConfig, AutoProcessor, LlavaForConditionalGeneration

    source, where = zoo.CHECKPOINTS / "captioner", tmp_path_factory.mktemp("little")
    config = AutoConfig.from_pretrained(source)
    for part, sizes in (
        (config.text_config, {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 2}),
        (config.vision_config, {"hidden_size": 16, "intermediate_size": 16}),
    ):
        for name, value in {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}.items():
            setattr(part, name, value)
    LlavaForConditionalGeneration(config).save_pretrained(where)
    AutoProcessor.from_pretrained(source).save_pretrained(where)
    return where


@pytest.mark.slow
def test_many_kills_lose_no_record_and_repeat_none(tmp_path):
    check_kills(tmp_path, 2000, 100, [300, 900, 1500])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_images_three_kills_and_memory_is_flat(tmp_path, little):
    """Memory of the run behind the third kill, a thousand records after its start and in its last thousand."""
    seen = check_kills(tmp_path, 10_000, 100, [500, 1200, 2000], "--model", str(little))
    first = [size for count, size in seen if 3000 <= count < 4000]
    last = [size for count, size in seen if 9000 <= count < 10_000]
    print(f"MB at records 3000-4000: {max(first) / 1e3:.1f}, 9000-10000: {max(last) / 1e3:.1f}")
    assert max(last) <= 1.03 * max(first)


def test_images_that_pil_warns_of_are_refused_in_any_thread(tmp_path, monkeypatch):
    path = tmp_path / "big.png"
    Image.new("RGB", (40, 40)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    from visspec.eval.metrics.images import open_image

    def look(_):
        with pytest.raises(ValueError, match="more pixels than the limit"):
            open_image(path)

    assert len(list(prefetched(look, range(20), 4, 8))) == 20
