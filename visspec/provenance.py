"""Where a number or a checkpoint comes from: versions, device, dtype, attention, threads, seed, git revision."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance(model=None, **more: Any) -> dict[str, Any]:
    """A JSON-able record of this process. `more` is added as it is (seed, command, ...)."""
    import transformers

    record: dict[str, Any] = {
        "visspec": __import__("visspec").__version__,
        "git": git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "device": "cpu",
    }
    if model is not None:
        record["device"] = torch.cuda.get_device_name() if model.device.type == "cuda" else str(model.device)
        record["dtype"] = str(model.dtype).removeprefix("torch.")
        record["attention"] = model.config.get_text_config()._attn_implementation
    return record | more


def git_revision() -> str:
    """The commit of the source checkout, with "+" when it has changes; "" for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *command: str) -> str:
    run = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.strip()
