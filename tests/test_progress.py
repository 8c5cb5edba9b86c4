"""Progress of long runs: bars in a terminal, lines in a log file, and what a run's last line says."""

import io
import re
import sys

import pytest

from tests.tiny_images import scene_files
from visspec.api import progress
from visspec.api.progress import Progress
from visspec.cli.main import main


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_line_every_thirty_seconds(clock, capsys):
    with Progress("images", 100, initial=20) as shown:
        for count in range(21, 81):
            clock[0] += 1.5
            shown.update(count, {"tau": "3.10"})
    first, *_, last = lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and first == "visspec: 40/100 images [00:30<01:30,  1.50s/images, tau=3.10]"
    assert last.startswith("visspec: 80/100 images [01:30<00:30")
    with Progress("images") as shown:  # of unknown length
        clock[0] += 60
        shown.update(120, {})
    assert capsys.readouterr().err == "visspec: 120 images [01:00,  2.00images/s]\n"


def test_bar_in_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("images", 2) as shown:
        shown.bar.mininterval = 0
        shown.update(1, {"tau": "2.00"})
        shown.write("visspec: a sentence")
        shown.update(2, {"tau": "2.00"})
    message = terminal.getvalue()
    assert "1/2" in message and re.search(r"\dimages/s, tau=2.00", message) and "\rvisspec: a sentence\n" in message


def test_a_caption_run_says_how_fast_it_was(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    scene_files(tmp_path, 3)
    (tmp_path / "3.png").write_bytes(b"broken")
    argv = ["caption", str(tmp_path), "--out", str(tmp_path / "o.jsonl"), "--max-new-tokens", "16", "--compare", "2"]
    assert main(argv) == 1
    message, logged = capsys.readouterr()
    assert re.search(r"4/4 images .*tau=\d+\.\d\d, tokens/s=\S+, failed=1", logged)
    summary, compared = message.splitlines()
    assert re.search(
        r"; \d+\.\d s, \S+ images per second, \d+\.\d\d tokens per pass \(tau\); 3 cut at the limit \(.*\)$",
        summary,
    )
    assert re.fullmatch(
        r"transformers' generate: \S+ images per second, 2 in batches of 8; this run was \d+\.\d\d times as fast",
        compared,
    )
