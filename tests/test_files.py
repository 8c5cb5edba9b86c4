"""Files that appear whole, targets tried before work, and results that outlive whatever ends a run."""

import json
import os
import resource
from contextlib import contextmanager

import pytest

from visspec.io.checkpoint import check_folder
from visspec.io.files import Journal, atomic_write, unwritable, write_json


@contextmanager
def full_disk():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_writable_check_leaves_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    assert unwritable(tmp_path / "deep" / "er" / "x.json") is None and unwritable(file) is None
    assert unwritable(tmp_path / "deep", folder=True) is None and unwritable(tmp_path, folder=True) is None
    for path, folder, why in (
        (tmp_path, False, "is a folder, expected a file"),
        (file, True, "is a file, expected a folder"),
        (file / "x.json", False, "can't be written (Not a directory)"),
        (file / "x", True, "can't be written (Not a directory)"),
        (tmp_path / ("x" * 300), False, "can't be written (File name too long)"),
    ):
        assert why in unwritable(path, folder) and str(path) in unwritable(path, folder)
    with full_disk():
        result = unwritable(tmp_path / "x.json")
    assert "can't be written (File too large)" in result
    assert file.read_text() == "kept" and os.listdir(tmp_path) == ["file"]


def test_special_files_and_links(tmp_path):
    reader, writer = os.pipe()
    write_json(f"/dev/fd/{writer}", {"a": 1})
    os.close(writer)
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    os.mkfifo(tmp_path / "fifo")
    assert unwritable(tmp_path / "fifo") is None
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_write(tmp_path / "link") as draft:
        draft.write_text("x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "x"


def test_link_loops_and_bad_settings(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, folder in ((loop, False), (loop, True), (loop / "x.json", False)):
        assert "can't be written (Too many levels of symbolic links)" in unwritable(path, folder)
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").symlink_to(weights / "model.safetensors")
    with pytest.raises(ValueError, match=r"names the weights model\.safetensors, expected them in the folder"):
        check_folder(weights)
    for text in ("[]", "{", "[" * 100_000, "\xff"):
        (tmp_path / "j.jsonl.about.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"about\.json: got no JSON object, expected the settings"):
            Journal(tmp_path / "j.jsonl", {}).__enter__()


def test_journal_retry_failed_and_lock(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, {}) as journal:
        for id, error in (("a", None), ("b", "gone"), ("c", None)):
            journal.add({"id": id, "error": error})
    with Journal(path, {}) as journal:
        assert journal.failed == {"b"} and journal.done == {"a", "b", "c"}
    with Journal(path, {}, retry=True) as journal:
        assert journal.done == {"a", "c"} and not journal.failed
        journal.add({"id": "b", "error": None})
    assert [json.loads(line)["id"] for line in path.open()] == ["a", "c", "b"]
    assert sorted(os.listdir(tmp_path)) == ["j.jsonl", "j.jsonl.about.json"]
