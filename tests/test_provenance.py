"""What a number carries: device, driver, Triton and date; None for what nobody tells, never an error."""

import subprocess
from datetime import date
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import torch

from visspec.io import provenance as origin


def test_a_cpu_record():
    record = origin.provenance(seed=3)
    assert record["device"] == "cpu" and record["seed"] == 3 and record["torch"] == torch.__version__
    assert date.fromisoformat(record["date"]) and "driver" not in record


def test_gpu_record(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU at {device}")
    monkeypatch.setattr(origin, "driver_version", lambda: "580.1")
    record = origin.provenance(device=torch.device("cuda", 1))
    assert record["device"] == "a GPU at cuda:1" and record["driver"] == "580.1"
    assert record["cuda"] == torch.version.cuda and record["triton"] == origin.triton_version()


def test_driver_from_nvidia_smi(monkeypatch):
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    errors = FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "x"), subprocess.TimeoutExpired("x", 1)
    for said, found in (("580.65.06\n580.65.06\n", "580.65.06"), ("\n", None), *((error, None) for error in errors)):
        run = mock.Mock(side_effect=[said if isinstance(said, Exception) else SimpleNamespace(stdout=said)])
        monkeypatch.setattr(subprocess, "run", run)
        assert origin.driver_version() == found and run.call_args.args == (command,)


def test_triton_goes_by_two_names(monkeypatch):
    def version(installed):
        def find(name):
            if name != installed:
                raise metadata.PackageNotFoundError(name)
            return "3.9"

        return find

    for installed, found in (("triton", "3.9"), ("pytorch-triton", "3.9"), ("neither", None)):
        monkeypatch.setattr(metadata, "version", version(installed))
        assert origin.triton_version() == found
