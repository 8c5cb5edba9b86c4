"""Training in two real processes (gloo): gradients are averaged, runs resume exactly, and one of them writes."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.children import forked, of_tests
from tests.doubles import refused
from tests.parallel_target import captions
from tests.tiny import model_of
from tests.training_processes import pictures
from visspec.api import loading
from visspec.api.training.processes import workers
from visspec.eval.report.training import write_page
from visspec.models.eagle.drafter import EagleDrafter
from visspec.train.loop import SingleProcess

ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(home: Path, module: str, *argv: str) -> None:
    """`main` of a module of the tests with two processes of one thread, as torchrun starts them."""
    code = of_tests(module, f"main({''.join(f'{value!r}, ' for value in argv)}Path({str(home)!r}))")
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | ALONE
    message = [home / f"said{rank}" for rank in "01"]
    ranks = [forked(code, message[r], **more, RANK=str(r), LOCAL_RANK=str(r)) for r in range(2)]
    for rank, process in enumerate(ranks):
        process.join(500)
        assert process.exitcode == 0, message[rank].read_text()[-3000:]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folders of drafters by name, trained in two processes."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'visspec[train]')")
    home = tmp_path_factory.mktemp("runs")
    pictures(home / "data")
    launch(home, "training_processes")
    return home


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.slow
def test_two_processes_train_one_drafter(home):
    whole = weights(home / "whole")
    start = EagleDrafter.for_model(model_of("llava"), seed=0, image_latents=0).head.state_dict()
    assert apart(whole, dict(start)) > 1e-3
    assert apart(whole, weights(home / "by-hand")) < 1e-5  # the mean of both processes' gradients
    assert apart(whole, weights(home / "broken")) == 0  # resumed exactly
    EagleDrafter.from_pretrained(home / "whole", model_of("llava"))
    progress = json.loads((home / "whole" / "run" / "progress.json").read_text())
    assert progress["workers"] == 2 and [p["step"] for p in progress["curve"]] == list(range(1, 9))
    page = (home / "whole" / "run" / "curves.html").read_text()
    assert page.count("<svg") == 4 and "2 processes" in page


@pytest.mark.slow
def test_tensor_parallel_target(tmp_path):
    """Tensor-parallel in two processes, and over devices: the tokens of one process on one device."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'visspec[train]')")
    launch(tmp_path, "parallel_target")
    whole = captions("cpu")
    assert whole["vispec"] == whole["stock"] and captions("balanced") == whole
    for rank in range(2):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert result.pop("rows") == whole["rows"] // 2
        assert all(result[name] == whole["stock"] for name in result)


def test_balanced_device():
    pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'visspec[train]')")
    assert loading.load(device="balanced")[0].device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_bad_input_is_a_sentence(monkeypatch, tmp_path, capsys):
    assert isinstance(workers("cpu"), SingleProcess)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="device: got 'tp' in one process"):
        loading.load(device="tp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert workers("tp").world == 1
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"accelerate is not installed. Run pip install 'visspec\[train\]'"):
        workers("cpu")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    argv = ["train", "drafter", "--target", "captioner", "--data", str(tmp_path), "--out", str(tmp_path / "o")]
    assert "accelerate is not installed" in refused(capsys, *argv)


def test_curves_of_one_step(tmp_path):
    progress = {"step": 1, "seconds": 2.0, "workers": 1, "plan": {"a<b": 1}, "validations": []}
    write_page(tmp_path / "p.html", progress | {"curve": [{"step": 1, "loss": 0.5, "agreed": 0.1}]}, {})
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 2 and "a&lt;b" in page
