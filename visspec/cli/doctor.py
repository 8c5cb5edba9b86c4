"""`visspec doctor`: reports what this machine has, and what will run on it."""

import importlib.metadata
import importlib.util
import os
import platform

from visspec.cli.arguments import NoOptions

NEEDED = "torch transformers diffusers torchvision pillow safetensors tqdm rich jinja2".split()
OPTIONAL = {"triton": "kernels on a CUDA device", "torch_fidelity": "FID with the original Inception weights"}


def run(arguments: NoOptions) -> None:
    print(report())


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report() -> str:
    """Return a plain-text page: versions, device, and a line for each thing that depends on them."""
    import torch

    lines = [f"python {platform.python_version()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"]
    lines += [f"{name} {version(name) or 'MISSING: needed'}" for name in NEEDED]
    cuda = torch.cuda.is_available()
    lines += [f"device: {torch.cuda.get_device_name()}" if cuda else "device: CPU only", *kernel_lines(cuda)]
    for name, use in OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        lines.append(f"{name}: {version(name) or 'there' if there else 'not installed'} ({use})")
    lines += [
        "will run: chains and trees with attn_implementation sdpa or eager; full and sliding-window attention",
        "will not run: encoder-decoders, models with only recurrent layers, flash attention",
    ]
    return "\n".join(lines)


def kernel_lines(cuda: bool) -> list[str]:
    """Return lines on what replaces the Triton kernels, and how draft passes attend.

    Args:
        cuda: Whether there is a CUDA device.
    """
    import torch

    from visspec.io.provenance import driver_version
    from visspec.models.attention import draft_attention, pass_inputs

    lines, place = [], "torch (no CUDA device)"
    if cuda:
        lines = [f"driver {driver_version() or 'unknown'}, CUDA {torch.version.cuda}"]
        if importlib.util.find_spec("triton") is None:
            place = "triton is MISSING: needed on a CUDA device"
        elif os.environ.get("TRITON_INTERPRET") == "1":
            place = "interpreted (TRITON_INTERPRET=1), for tests only"
        else:
            place = "Triton on CUDA capability {}.{}".format(*torch.cuda.get_device_capability())
    name, why = draft_attention.of_device(torch.device("cuda" if cuda else "cpu"), torch.bfloat16)
    return [
        *lines,
        f"kernels: {place}",
        f"draft passes of 16-bit models attend by: {pass_inputs.Backend(name, why=why)}",
        f"CUDA graphs: {'recorded on this device where asked for' if cuda else 'none without a CUDA device'}",
    ]
