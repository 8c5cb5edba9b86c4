"""What this machine has, and so what will run and what will not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform

NEEDED = (
    "torch", "transformers", "diffusers", "timm", "torchvision", "pillow", "safetensors", "tqdm", "rich", "jinja2",
)  # fmt: skip
OPTIONAL = {
    "triton": "kernels on a CUDA device",
    "torch_fidelity": "FID with the original Inception weights",
}


def add(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(arguments: argparse.Namespace) -> None:
    print(report())


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report() -> str:
    """A plain-text page: versions, device, and one line for each thing that depends on them."""
    import torch

    lines = [f"python {platform.python_version()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"]
    lines += [f"{name} {version(name) or 'MISSING: needed'}" for name in NEEDED]
    if torch.cuda.is_available():
        lines.append(f"device: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
        kernels = "Triton" if importlib.util.find_spec("triton") else "triton is MISSING: needed on a CUDA device"
    else:
        lines.append("device: CPU only")
        kernels = "torch (no CUDA device)"
    lines.append(f"kernels: {kernels}")
    for name, use in OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        lines.append(f"{name}: {version(name) or 'there' if there else 'not installed'} ({use})")
    lines += [
        "will run: chains and trees with attn_implementation sdpa or eager; full and sliding-window attention",
        "will not run: encoder-decoders, models with recurrent layers alone, flash attention (refused in one sentence)",
    ]
    return "\n".join(lines)
