"""What this machine has, and so what will run and what will not."""

import importlib.metadata
import importlib.util
import os
import platform
from datetime import date
from types import ModuleType

from visspec.cli.arguments import NoOptions

NEEDED = "torch transformers diffusers timm torchvision pillow safetensors tqdm rich jinja2".split()
SHARED = {  # bytes of shared memory of a program, the most of any form, as compiled for Hopper (tests/kernels)
    "accept_tree": 256, "ancestors": 0, "commit_kv": 0, "grouped_mass": 32,
    "guided_warp": 512, "neighbour_mass": 32, "tree_attention": 98304,
}  # fmt: skip
OPTIONAL = {
    "triton": "kernels on a CUDA device",
    "torch_fidelity": "FID with the original Inception weights",
}


def run(arguments: NoOptions) -> None:
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
    found = torch.cuda.is_available()
    lines += [f"device: {torch.cuda.get_device_name()}" if found else "device: CPU only", *kernel_lines(found)]
    for name, use in OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        lines.append(f"{name}: {version(name) or 'there' if there else 'not installed'} ({use})")
    lines += [
        "will run: chains and trees with attn_implementation sdpa or eager; full and sliding-window attention",
        "will not run: encoder-decoders, models with recurrent layers alone, flash attention (refused in one sentence)",
    ]
    return "\n".join(lines)


def kernel_lines(cuda: bool) -> list[str]:
    """What runs in place of each kernel on the device at hand, and how draft passes attend; `cuda`: whether there is a
    CUDA device.
    """
    import torch

    from visspec import kernels
    from visspec.io.provenance import driver_version
    from visspec.models.attention import ragged

    names = [name for name in kernels.__all__ if name != "FILES"]
    triton = importlib.util.find_spec("triton") is not None
    device, lines = torch.device("cpu"), []
    if not cuda:
        lines.append("kernels: torch (no CUDA device)")
        lines += [f"  {name}: torch path" for name in names]
    else:
        device = torch.device("cuda")
        lines.append(f"driver {driver_version() or 'unknown'}, CUDA {torch.version.cuda}, {date.today()}")
        lines.append(f"kernels: {'Triton' if triton else 'triton is MISSING: needed on a CUDA device'}")
        place, room = ("will not run", None) if not triton else triton_device(torch.cuda)
        lines += [f"  {name}: {on_device(name, place, room)}" for name in names]
    took = ragged.takes(ragged.varlen_attn)
    form = [name for name in ("seqused_k", "enable_gqa") if name in took]
    attends = f"there ({', '.join(form) or 'without seqused_k'})" if took else "not in this torch"
    attends += "" if cuda or not took else ", runs on CUDA only"
    name, why = ragged.of_device(device, torch.bfloat16)
    return [
        *lines,
        f"torch.nn.attention.varlen: {attends}",
        f"draft passes of 16-bit models attend by: {ragged.Backend(name, why=why)}",
        f"CUDA graphs: {'recorded on this device where asked for' if cuda else 'none without a CUDA device'}",
    ]


def triton_device(cuda: ModuleType) -> tuple[str, int | None]:
    """(where Triton runs kernels, the bytes of shared memory that one program may have there)."""
    major, minor = cuda.get_device_capability()
    room = getattr(cuda.get_device_properties(0), "shared_memory_per_block_optin", None)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted (TRITON_INTERPRET=1), for tests only", None
    return f"Triton on CUDA capability {major}.{minor}", room


def on_device(name: str, place: str, room: int | None) -> str:
    """What is said of a kernel on a GPU."""
    needs = SHARED[name]
    if room is None:
        return place
    told = f"{needs / 1024:.1f} of {room / 1024:.0f} KB of shared memory"
    return f"{place}, {told}" if needs <= room else f"will not run in every form: it needs {told}"
