"""`visspec caption --out`: folders, tables and shards; kills, resumes, corrupt files, bad input in one sentence."""

import io
import json
import os
import re
import shutil
import tarfile
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.children import command
from tests.doubles import refused, tar_of
from visspec import registry
from visspec.api import sources
from visspec.api.captions import PROMPT, Captions, prefetch_map, prepare
from visspec.api.loading import load
from visspec.api.text.accelerate import accelerate
from visspec.cli.main import main
from visspec.io import included
from visspec.io.files import Journal, atomic_write
from visspec.io.images import image_files

SHORT = ["--max-new-tokens", "4", "--drafter", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("images")
    (home / "deep" / "er").mkdir(parents=True)
    for i, image in enumerate(included.scenes("shapes").images(4)):
        image.save(home / ["", "deep", "deep/er", ""][i] / f"scene{i}.png")
    return home


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_caption_resume(folder, tmp_path, capsys):
    out, page = tmp_path / "c.jsonl", tmp_path / "page.html"
    argv = ["caption", str(folder), "--out", str(out), "--report", str(page), *SHORT]
    assert main(argv) == 0
    result = lines(out)
    assert len(result) == 4 and all(r["caption"] and r["ended"] == "length" and r["tokens"] == 4 for r in result)
    assert sorted(r["id"] for r in result) == sorted(str(p) for p in folder.rglob("*.png"))
    text = page.read_text()
    assert text.count("data:image/") == 4 and "4 records, 0 failed" in text and result[0]["id"] in text
    with open(out, "ab") as file:
        file.write(b'{"id": "torn')
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[1:]))
    assert main(argv) == 0
    assert sorted(map(str, lines(out))) == sorted(map(str, result))
    assert "1 records, 0 of them failed, 3 were there" in capsys.readouterr().out
    assert "prompt 'other'" in refused(capsys, *argv, "--prompt", "other")


def test_captions_are_those_of_generate(folder, tmp_path):
    out, (model, processor) = tmp_path / "c.jsonl", load("captioner")
    assert main(["caption", str(folder), "--out", str(out), "--max-new-tokens", "20", "--slots", "2"]) == 0
    for row in lines(out):
        inputs = prepare(processor, [Image.open(row["id"])], PROMPT, model)
        tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert row["caption"] == processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def test_globs_lines_and_shards(folder, tmp_path, capsys):
    image = str(folder / "scene0.png")
    table, shard = tmp_path / "t.jsonl", tmp_path / "shard-0.tar"
    asked = {"image": image, "id": "a", "prompt": "what is the ground like ?"}
    good = map(json.dumps, (asked, {"id": "b"}, {"image": image, "id": "a"}))
    table.write_text("\n".join([*good, "{", "7", "", json.dumps({"image": "gone.png", "id": 5})]))
    members = {
        "x/one.png": Path(image).read_bytes(), "x/one.json": b'{"prompt": "how many shapes are there ?"}',
        "four.png": Path(image).read_bytes(), "x/two.json": b"{}", "three.png": b"no image",
    }  # fmt: skip
    tar_of(shard, members)
    out = tmp_path / "out.jsonl"
    assert main(["caption", str(folder / "**" / "*.png"), str(table), str(shard), "--out", str(out), *SHORT]) == 1
    result = {r["id"]: r for r in lines(out)}
    assert len(lines(out)) == len(result) == 4 + 5 + 4
    assert result["a"]["caption"] and result["a"]["prompt"] == "what is the ground like ?"
    prompts = {name: result[f"{shard}/{name}"]["prompt"] for name in ("x/one", "four")}
    assert prompts == {"x/one": "how many shapes are there ?", "four": PROMPT}  # not that of the image before
    assert result[f"{shard}/x/one"]["caption"] and result[f"{shard}/four"]["caption"]
    assert "got no image" in result["b"]["error"] and "got no image" in result[f"{shard}/x/two"]["error"]
    assert "not JSON" in result[f"{table}:4"]["error"] and "got int" in result[f"{table}:5"]["error"]
    assert "gone.png" in result["5"]["error"] and "not a readable" in result[f"{shard}/three"]["error"]
    assert "a: got this id twice" in capsys.readouterr().err


def linked_shard(path, files, links):
    """A tar of files by name, with links (name, kind, what it stands for): symbolic ones first, others last."""
    entries = [(name, kind, to, b"") for name, kind, to in links]
    entries += [(name, tarfile.REGTYPE, "", data) for name, data in files.items()]
    with tarfile.open(path, "w") as shard:
        for name, kind, to, data in sorted(
            entries, key=lambda one: {tarfile.SYMTYPE: 0, tarfile.REGTYPE: 1}.get(one[1], 2)
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, to, len(data)
            shard.addfile(info, io.BytesIO(data))
    return path


def test_shard_links(folder, tmp_path, capsys):
    data, secret = (folder / "scene0.png").read_bytes(), tmp_path / "secret.png"
    secret.write_bytes(data)
    soft, hard = tarfile.SYMTYPE, tarfile.LNKTYPE
    links = [("x/b.png", soft, "../x/a.png"), ("x/b.prompt", soft, "a.prompt"), ("c.png", hard, "x/a.png"),
             ("e.png", hard, "c.png"), ("f.png", soft, str(secret)), ("g.png", soft, "../secret.png"),
             ("h.png", soft, "h.png"), ("i.png", hard, "gone.png"), ("j.png", tarfile.FIFOTYPE, ""),
             ("folder", soft, "x"), ("notes.txt", soft, "gone")]  # fmt: skip
    shard = linked_shard(tmp_path / "s.tar", {"x/a.png": data, "x/a.prompt": b"42", "d.png": data}, links)
    result = {record.id.removeprefix(f"{shard}/"): record for record in sources.records([shard])}
    good = {id: record.prompt for id, record in result.items() if record.error is None and record.image == data}
    assert good == {"x/a": "42", "x/b": "42", "c": None, "d": None, "e": None}
    bad = {id: record.error for id, record in result.items() if id not in good}
    assert set(bad) == {"f", "g", "h", "i", "j"}
    assert all(
        f"got {id}.png, which is neither a file nor a link to one in the archive" in text for id, text in bad.items()
    )
    out = tmp_path / "o.jsonl"
    assert main(["caption", str(shard), "--out", str(out), *SHORT]) == 1
    assert len(lines(out)) == 10 and sum("caption" in line and line["caption"] is not None for line in lines(out)) == 5
    whole = linked_shard(tmp_path / "w.tar", {"a.png": data}, [("b.png", hard, "a.png"), ("c.png", soft, "b.png")])
    assert main(["caption", str(whole), "--out", str(tmp_path / "w.jsonl"), *SHORT]) == 0


def test_truncated_shard(folder, tmp_path):
    shard = tmp_path / "s.tar"
    with tarfile.open(shard, "w") as file:
        for i in range(3):
            file.add(folder / "scene0.png", f"{i}.png")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    found = list(sources.records([shard]))
    assert [r.id for r in found if r.error is None][:1] == [f"{shard}/0"] and "can't be read behind" in found[-1].error
    assert found[-1].id == str(shard)


def test_parquet_in_and_out(folder, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    image = folder / "scene0.png"
    table, out = tmp_path / "t.parquet", tmp_path / "o.parquet"
    images = {"a": {"bytes": image.read_bytes(), "path": None}, "b": {"bytes": None, "path": str(image)}}
    rows = [{"id": id, "image": value} for id, value in images.items()]
    parquet.write_table(arrow.Table.from_pylist(rows), table)
    argv = ["caption", str(table), "--out", str(out), *SHORT]
    assert main(argv) == 0 and main(["caption", str(folder / "deep"), *argv[1:]]) == 0
    result = parquet.read_table(out).to_pylist()
    assert [r["id"] for r in result][:2] in (["a", "b"], ["b", "a"]) and len(result) == 4
    assert result[0]["caption"] == result[1]["caption"] and result[0]["error"] is None
    table.write_bytes(table.read_bytes()[:-20])
    (broken,) = sources.records([table])
    assert "can't be read behind row 0" in broken.error


def test_datasets(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    files = sorted(map(str, folder.rglob("*.png")))[:2]
    table = datasets.table.InMemoryTable.from_pydict({"image": files, "id": ["a", "b"]})
    result = datasets.Dataset(table, fingerprint="two")
    result.save_to_disk(tmp_path / "set")
    assert [(r.id, r.error) for r in sources.records([tmp_path / "set"])] == [("a", None), ("b", None)]
    result.remove_columns("id").save_to_disk(tmp_path / "bare")
    assert [r.id for r in sources.records([tmp_path / "bare"])] == [f"{tmp_path / 'bare'}:{i}" for i in range(2)]


DEEP = "[" * 100_000  # more levels than a JSON reader takes


def test_shards_of_one_name_are_told_apart(folder, tmp_path, capsys):
    data = (folder / "scene0.png").read_bytes()
    shards = [tar_of(tmp_path / home / "00000.tar", {"0.png": data, "1.png": data}) for home in "ab"]
    out = tmp_path / "o.jsonl"
    for shard, there in zip([*shards, shards[0]], (2, 4, 4)):
        assert main(["caption", str(shard), "--out", str(out), *SHORT]) == 0 and len(lines(out)) == there
    assert {r["id"] for r in lines(out)} == {f"{shard}/{i}" for shard in shards for i in range(2)}
    assert "0 records, 0 of them failed, 4 were there" in capsys.readouterr().out


def test_exit_code_of_all_records(folder, tmp_path, capsys):
    """The same command again exits as the first, until --retry-failed makes anew what failed, and that alone."""
    out, table = tmp_path / "o.jsonl", tmp_path / "t.jsonl"
    good, bad = {"id": "good", "image": str(folder / "scene0.png")}, {"id": "bad", "image": "gone.png"}

    def run(*entries, options=()):
        table.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return main(["caption", str(table), "--out", str(out), *SHORT, *options]), capsys.readouterr().out

    assert run(good)[0] == 0
    for made in (0, 0):
        code, message = run(good, good)  # named, but no failure of the record that is made
        assert code == 1 and f"{made} records, 0 of them failed, 1 were there, 1 repeated ids" in message
    for made in (1, 0):
        code, message = run(good, bad)
        assert code == 1 and f"{made} records, {made} of them failed" in message
    assert "2 were there (1 of these failed; --retry-failed makes them again)" in message
    before = lines(out)[:1]
    assert run(good, bad, options=["--retry-failed"])[0] == 1 and len(lines(out)) == 2
    (tmp_path / "gone.png").write_bytes((folder / "scene0.png").read_bytes())
    assert run(good, bad)[0] == 1 and run(good, bad, options=["--retry-failed"])[0] == 0
    assert lines(out)[:1] == before and [(r["id"], r["error"]) for r in lines(out)] == [("good", None), ("bad", None)]


def test_unlistable_folder(folder, monkeypatch):
    scan, closed = os.scandir, folder / "deep" / "er"

    def scandir(path="."):
        if Path(os.fspath(path)) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError):
        sources.records([folder])
    with pytest.raises(PermissionError):
        image_files(folder)  # a metric over part of a folder would be of another set


@pytest.mark.parametrize("source", ["", "**/*"])
def test_unsupported_files_are_counted(source, tmp_path, capsys):
    (tmp_path / ".thumbnails").mkdir()
    for name in ("a.gif", "b.bmp", "c.TIFF", "d.png", ".thumbnails/e.png"):
        Image.new("RGB", (48, 48)).save(tmp_path / name)
    for name in ("1.heic", "2.HEIC", "3.jxl", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (only := tmp_path / ".only").mkdir()
    (only / "1.heic").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"holds no image .*, but 1 .heic"):
        sources.records([only])
    result = list(sources.records([f"{tmp_path}/{source}" if source else tmp_path]))
    assert [Path(record.id).name for record in result] == ["a.gif", "b.bmp", "c.TIFF", "d.png", "*.heic", "*.jxl"]
    assert "2 .heic files can't be read" in result[4].error and "1 .jxl files" in result[5].error
    assert main(["caption", str(tmp_path), "--out", str(tmp_path / "o.jsonl"), *SHORT]) == 1
    assert "2 of them failed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet"])
def test_removed_output_ends_run(name, folder, tmp_path, capsys, monkeypatch):
    out, add = tmp_path / "out" / name, Journal.add

    def adding(journal, record):
        add(journal, record)
        shutil.rmtree(out.parent)

    monkeypatch.setattr(Journal, "add", adding)
    images = [str(path) for path in folder.rglob("*.png")]
    for count in (1, 4):  # behind the last record, and between two
        message = refused(capsys, "caption", *images[:count], "--out", str(out), *SHORT)
        assert "The file was removed during the run" in message and not out.exists()


def test_names_that_are_no_text(folder, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    home = tmp_path / os.fsdecode(b"h\xf6me")
    home.mkdir()
    data, names = (folder / "scene0.png").read_bytes(), [b"\xff.png", b"a\nb.png", "\N{SNOWMAN} [x]*.png".encode()]
    for name in names:
        (home / os.fsdecode(name)).write_bytes(data)
    table = home / "t.jsonl"
    table.write_text("\n".join(json.dumps({"id": id, "image": os.fsdecode(names[0])}) for id in ("\ud800", "ok")))
    shard = tar_of(home / "s.tar", {os.fsdecode(b"\xe9.png"): data})
    out = home / "o.parquet"
    argv = ["caption", *map(str, (home, table, shard)), "--out", str(out), "--temperature", "0.9", *SHORT]
    for _ in range(2):
        assert main(argv) == 0
        ids = [row["id"] for row in lines(f"{out}.jsonl")]
        assert sorted(ids) == sorted([*(str(home / os.fsdecode(n)) for n in names), "\ud800", "ok", f"{shard}/\udce9"])
        with open(out, "rb") as file:
            assert [row["id"] for row in parquet.read_table(file).to_pylist()] == list(map(sources.as_utf8, ids))


def test_deep_json_fails_one_record(folder, tmp_path):
    data, good = (folder / "scene0.png").read_bytes(), {"image": str(folder / "scene0.png"), "prompt": "what ?"}
    table, shard = tmp_path / "t.jsonl", tmp_path / "s.tar"
    table.write_text(f'{DEEP}\n{{"prompt": {DEEP}\n{json.dumps(good)}\n')
    tar_of(shard, {"a.png": data, "a.json": DEEP.encode(), "b.png": data, "b.prompt": b"42", "c.png": data})
    one, two, three = sources.records([table])
    assert "not JSON" in one.error and "not JSON" in two.error and (three.error, three.id) == (None, f"{table}:3")
    assert [(r.prompt, bool(r.error)) for r in sources.prompts(table)] == [(None, True)] * 2 + [("what ?", False)]
    first, second, third = sources.records([shard])
    assert first.error == f"{shard}/a: got a .json that is not JSON, expected an object"
    assert (second.prompt, second.image) == ("42", data) and (third.prompt, third.image) == (None, data)


def test_large_members_not_read_whole(folder, tmp_path):
    """A sparse member claims 40 GB and takes a block."""
    info = tarfile.TarInfo("huge.png")
    info.size = 512
    info.pax_headers = {"GNU.sparse.size": str(40 << 30), "GNU.sparse.map": "0,512"}
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as file:
        file.addfile(info, io.BytesIO(bytes(512)))
        file.add(folder / "scene0.png", "next.png")
    huge, after = sources.records([tmp_path / "s.tar"])
    assert "got huge.png of 42949672960 bytes, expected at most 268435456" in huge.error and huge.image is None
    assert after.error is None and after.image == (folder / "scene0.png").read_bytes()


def test_rows_of_parquet(tmp_path):
    """Ids where none are given, values that Python has none for, and more rows than are written at once."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source, out = tmp_path / "s.parquet", tmp_path / "o.parquet"
    parquet.write_table(arrow.table({"image": [f"{i}.png" for i in range(150)]}), source)
    result = [(r.id, r.image) for r in sources.records([source])]
    assert result == [(f"{source}:{i + 1}", tmp_path / f"{i}.png") for i in range(150)]
    times = arrow.array([0, 2**61, 1], arrow.timestamp("us"))
    parquet.write_table(arrow.table({"id": times, "image": ["a", "b", "c"]}), source)
    first, second, third = sources.records([source])
    assert first.id.startswith("1970") and second.id == f"{source}:2" and third.error is None
    assert "got values that can't be read" in second.error
    sources.write_parquet(({"id": str(i)} for i in range(2500)), out, {"id": "string"})
    assert parquet.read_table(out)["id"].to_pylist() == [str(i) for i in range(2500)]


def test_default_prompt_and_limit(folder, little, tmp_path, capsys):
    """Included models know few words: they keep their prompt and limit, also by their folder."""
    table = tmp_path / "t.jsonl"
    table.write_text(json.dumps({"id": "a", "image": str(folder / "scene0.png")}))
    own = registry.CHECKPOINTS / "captioner", PROMPT, 128
    for model, prompt, limit in ((little, "Describe this image in detail.", 256), own):
        out = tmp_path / f"{limit}.jsonl"
        assert main(["caption", str(table), "--out", str(out), "--model", str(model), "--drafter", "none"]) == 0
        about, (row,) = json.loads(Path(f"{out}.about.json").read_text()), lines(out)
        assert row["prompt"] == about["prompt"] == prompt and about["sampling"]["max_new_tokens"] == limit
        cut = row["tokens"] == limit
        assert (row["ended"] == "length") == cut == ("; 1 cut at the limit" in capsys.readouterr().out)
        assert cut == (limit == 256)  # the random model does not end
        assert Captions(accelerate(load(str(model))[0], None), None).request == prompt


def test_every_record_has_its_own_seed(folder, little):
    model, processor = load(str(little))
    captions = Captions(accelerate(model, None), processor, do_sample=True, temperature=1.0, max_new_tokens=8, seed=3)
    image = folder / "scene0.png"
    given = [sources.Record(id, image) for id in "abc"]
    entries = [captions._entry(captions._prepare(record)) for record in given]
    assert [entry["seed"] for entry in entries] == [sources.seed_of(3, id) for id in "abc"]
    together = {made.path: made.text for made in captions(given)}
    (alone,) = captions(given[1:2])
    assert alone.text == together["b"] and len(set(together.values())) == 3


def test_prompt_beyond_context(folder, tmp_path):
    out, table = tmp_path / "o.jsonl", tmp_path / "t.jsonl"
    long = {"image": str(folder / "scene0.png"), "id": "long", "prompt": "the " * 5000}
    table.write_text(json.dumps(long) + "\n" + json.dumps(long | {"id": "short", "prompt": None}))
    assert main(["caption", str(table), "--out", str(out), *SHORT]) == 1
    result = {r["id"]: r for r in lines(out)}
    assert "the model's context" in result["long"]["error"] and result["short"]["caption"]


def test_captions_close_after_source_error(folder, little):
    """What was read ahead is captioned first; a close ends what runs, and its threads."""

    def broken():
        for i in range(5):
            yield sources.Record(str(i), folder / "scene0.png")
        raise OSError("the source is gone")

    def threads():
        return [t for t in threading.enumerate() if t.name.startswith("visspec-images")]

    model, processor = load(str(little))
    result = []
    with Captions(accelerate(model, None), processor, slots=2, do_sample=False, max_new_tokens=4) as captions:
        with pytest.raises(OSError, match="the source is gone"):
            for made in captions(broken()):
                result.append(made.path)
        assert sorted(result) == list("01234")
        running = captions([folder / "scene0.png"] * 9)
        assert next(running).text and threads()
    assert list(running) == []
    for thread in threads():
        thread.join(5)
    assert not threads()


def test_prompt_with_image_marks(folder, little):
    model, processor = load(str(little))
    captions = Captions(accelerate(model, None), processor, do_sample=False, max_new_tokens=4)
    (made,) = captions([sources.Record("odd", folder / "scene0.png", "<image> and <image> ?")])
    message = "prompt: got '<image> and <image> ?' with 3 <image> for 1 image, expected none in it."
    assert made.error == f"odd: {message}"


def test_journal_of_one_run(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, {"a": (1, 2)}) as journal:
        journal.add({"id": "x"})
        with pytest.raises(ValueError, match="Another run is writing"), Journal(path, {"a": (1, 2)}):
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
        with pytest.raises(OSError, match="No space") as adding:
            journal.add({"id": "y"})
        with pytest.raises(OSError, match="No space") as closing:
            journal.__exit__(None, None, None)
        assert adding.value.filename == closing.value.filename == str(path)
        journal._file = room
    other = tmp_path / "other"
    with pytest.raises(OSError, match=f"No space left on device: '{other}'"), atomic_write(other):
        Path("/dev/full").write_bytes(b"x")
    with Journal(path, {}) as again:
        assert again.done == {"x"}


def test_prefetch_order_and_depth():
    read = []

    def given():
        for i in range(20):
            read.append(i)
            yield i

    made = prefetch_map(lambda i: i * i, given(), 3, 4)
    assert [next(made) for _ in range(3)] == [0, 1, 4] and len(read) <= 7
    made.close()


def count_of(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def killed(argv, out: Path, at: int) -> None:
    process = command(argv, out.with_name("said"))
    while process.is_alive() and count_of(out) < at:
        time.sleep(0.01)
    process.kill()
    process.join()


def watched(argv, out: Path) -> tuple[int, list[tuple[int, int]]]:
    """Run a command to its end. Returns its code, and (lines, resident kB) from time to time."""
    process, seen = command(argv, out.with_name("said")), []
    status = Path(f"/proc/{process.pid}/status")
    while process.is_alive():
        if status.exists() and (result := re.search(r"VmRSS:\s+(\d+) kB", status.read_text())):
            seen.append((count_of(out), int(result[1])))
        time.sleep(0.1)
    return process.exitcode, seen


def many(home: Path, count: int, corrupt: int) -> None:
    kinds = []
    for image in included.scenes("shapes").images(5):
        image.save(buffer := io.BytesIO(), "PNG")
        kinds.append(buffer.getvalue())
    for i in range(count):
        broken = i % corrupt == corrupt - 1
        (home / f"{i:05}.png").write_bytes(b"\x89PNG broken" if broken else kinds[i % len(kinds)])


def check_kills(tmp_path, count: int, corrupt: int, kills: list[int], *options: str) -> list[tuple[int, int]]:
    """Kill runs at these numbers of records, and look at what is there in the end. Returns the last run's memory."""
    parquet = pytest.importorskip("pyarrow.parquet")
    home, out = tmp_path / "images", tmp_path / "o.parquet.jsonl"
    home.mkdir()
    many(home, count, corrupt)
    argv = ["caption", str(home), "--out", str(tmp_path / "o.parquet"), *SHORT, *options]
    before: list[bytes] = []
    for at in kills:
        killed(argv, out, at)
        now = out.read_bytes().splitlines(keepends=True)
        assert now[: len(before)] == before  # finished records stay as they are
        before = [line for line in now if line.endswith(b"\n")]
    assert len(before) < count
    code, seen = watched(argv, out)
    assert code == 1  # also where earlier runs met the broken files
    result = lines(out)
    assert [line.encode() for line in out.read_text().splitlines(keepends=True)][: len(before)] == before
    assert len(result) == len({r["id"] for r in result}) == count
    assert sum(r["error"] is not None for r in result) == count // corrupt
    assert all("broken or truncated" in r["error"] or "not a readable" in r["error"] for r in result if r["error"])
    with open(tmp_path / "o.parquet", "rb") as file:
        assert parquet.read_table(file).to_pylist() == result
    return seen


def test_caption_resume_after_kill(tmp_path, little):
    drawn, whole = ["--temperature", "0.9", "--model", str(little)], tmp_path / "whole.jsonl"
    check_kills(tmp_path, 40, 8, [4], *drawn)
    assert main(["caption", str(tmp_path / "images"), "--out", str(whole), *SHORT, *drawn]) == 1
    assert sorted(map(str, lines(whole))) == sorted(map(str, lines(tmp_path / "o.parquet.jsonl")))


@pytest.fixture(scope="module")
def little(tmp_path_factory) -> Path:
    from transformers import AutoConfig, AutoProcessor, LlavaForConditionalGeneration

    source, where = registry.CHECKPOINTS / "captioner", tmp_path_factory.mktemp("little")
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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_caption_memory_is_flat(tmp_path, little):
    """Memory of the run behind the third kill, a thousand records after its start and in its last thousand."""
    seen = check_kills(tmp_path, 10_000, 100, [500, 1200, 2000], "--model", str(little))
    first = [size for count, size in seen if 3000 <= count < 4000]
    last = [size for count, size in seen if 9000 <= count < 10_000]
    print(f"MB at records 3000-4000: {max(first) / 1e3:.1f}, 9000-10000: {max(last) / 1e3:.1f}")
    assert max(last) <= 1.03 * max(first)
