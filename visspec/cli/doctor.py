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
    "triton": "compiled kernels on a GPU",
    "torch_fidelity": "FID with the original Inception weights",
    "matplotlib": "figures of the report",
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
        kernels = "compiled" if importlib.util.find_spec("triton") else "torch references (triton is missing)"
    else:
        lines.append("device: CPU only")
        kernels = "torch references (no CUDA device; TRITON_INTERPRET=1 runs the Triton code slowly, for tests)"
    lines.append(f"kernels: {kernels}")
    for name, use in OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        lines.append(f"{name}: {version(name) or 'there' if there else 'not installed'} ({use})")
    lines += [
        "will run: chains and trees with attn_implementation sdpa or eager; full and sliding-window attention",
        "will not run: encoder-decoders, recurrent layers, flash attention (refused in one sentence)",
    ]
    return "\n".join(lines)
