"""Provenance of a number or a checkpoint: versions, device, driver, dtype, attention, threads, seed, git, date."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from visspec.io.version import VERSION


def provenance(model=None, device: torch.device | None = None, **more: object) -> dict[str, Any]:
    """Return a JSON-serialisable record of this process for the model's device, or for `device` (default: CPU). `more`
    is added unchanged (seed, command, ...). For a GPU the record includes its name, driver, CUDA and Triton.
    """
    record: dict[str, Any] = {
        "visspec": VERSION,
        "git": git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    record |= device_record(device or (torch.device("cpu") if model is None else model.device))
    if model is not None:
        record["dtype"] = str(model.dtype).removeprefix("torch.")
        record["attention"] = model.config.get_text_config()._attn_implementation
    return record | more


def device_record(device: torch.device) -> dict[str, Any]:
    """Return the device by name; for a GPU also the versions of driver, CUDA and Triton, None if unknown."""
    if device.type != "cuda":
        return {"device": str(device)}
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "triton": triton_version(),
    }


def driver_version() -> str | None:
    """Return the version of the GPU driver from `nvidia-smi`; torch only knows the supported CUDA version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = _output_of(query, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0].strip() if output else None


def triton_version() -> str | None:
    for name in ("triton", "pytorch-triton"):  # nightly builds of torch use the second
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def git_revision() -> str:
    """Return the commit of the source checkout, with "+" if it has changes; "" for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        head = _output_of(["git", "rev-parse", "--short", "HEAD"], root)
        return head + ("+" if _output_of(["git", "status", "--porcelain", "--untracked-files=no"], root) else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _output_of(command: list[str], cwd: Path | None = None, timeout: float = 10) -> str:
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=True)
    return run.stdout.strip()
