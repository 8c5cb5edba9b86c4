"""`visspec bench kernels`: a row for each kernel, and eager forms that compute the same."""

import json
from importlib import import_module

import pytest
import torch

from visspec import kernels
from visspec.cli.main import main

SMALL = {
    "accept": {"levels": (3, 4), "vocabulary": 200}, "warp": {"rows": 3, "vocabulary": 1200},
    "neighbours": {"rows": 3, "vocabulary": 300, "k": 40}, "groups": {"rows": 3, "vocabulary": 300},
    "commit": {"tensors": 2, "rows": 2, "heads": 1, "slots": 80},
    "attention": {"prefix": 80, "nodes": 6, "heads": 4, "groups": 2},
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    for name, sizes in SMALL.items():
        module = import_module(f"visspec.kernels.{name}")
        make = module.bench_case
        monkeypatch.setattr(module, "bench_case", lambda device, make=make, sizes=sizes: make(device, **sizes))


@pytest.mark.parametrize("name", [name for name in SMALL if name != "commit"])
def test_the_eager_form_computes_the_same(name, small):
    case = import_module(f"visspec.kernels.{name}").bench_case("cpu")
    ours, eager = case.ours(), case.eager()
    if name == "accept":
        (path, token), (nodes, other) = ours, eager
        assert path[path >= 0].tolist() == nodes and len(nodes) > 1 and token.tolist() == other.tolist()
    else:
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-5)


def test_rows_of_a_cpu(small, tmp_path, capsys):
    file = tmp_path / "k.json"
    assert main(["bench", "kernels", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [row["kernel"] for row in record["rows"]] == sorted(SMALL) and set(SMALL) <= set(kernels.FILES)
    assert set(record["rows"][0]) == {"kernel", "shape", "dtype", "device", "time_us", "ratio_to_eager"}
    assert all(row["time_us"] > 0 and row["ratio_to_eager"] > 0 for row in record["rows"])
    assert record["bench"] == "kernels"
    assert "the Triton kernels need --device cuda" in " ".join(capsys.readouterr().out.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_round_waits_for_nothing_on_a_gpu(small):
    cases = [import_module(f"visspec.kernels.{name}").bench_case("cuda") for name in ("warp", "accept", "commit")]
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for case in cases:
                case.ours()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "device: got 'cuda', which this torch can't use" in capsys.readouterr().err
