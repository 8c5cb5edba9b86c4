"""Rewrite an authors' .pt, .pth, .bin or .ckpt file as safetensors: the only place that opens a pickle of others.

python -m visspec.recipes.convert_checkpoint c2i_B_256.pt c2i_B_256.safetensors
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

WRAPPERS = ("model", "module", "state_dict")  # how training scripts file their weights


def convert(path: str | Path, out: str | Path) -> None:
    """Write the tensors of a .pt, .pth, .bin or .ckpt file as safetensors, their names unchanged.

    The file is unpickled with `weights_only=True`, so nothing in it runs; one that needs more is refused. The weights
    may lie under 'model', 'module' or 'state_dict'; everything that is no tensor (optimizer, steps) is left behind.
    """
    path, out = Path(path), Path(out)
    if out.suffix != ".safetensors" or out.exists():
        raise ValueError(f"out: got {out}, expected a new file that ends in .safetensors")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # training arguments, often saved beside
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files end in errors of any kind
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"path: {path} is not a file of plain tensors, expected one ({what})") from None
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    values = content.items() if isinstance(content, Mapping) else ()
    tensors = {str(name): value.detach().contiguous().clone() for name, value in values if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"path: {path} holds no tensors, expected a state dict or one under {', '.join(WRAPPERS)}")
    save_file(tensors, out, metadata={"format": "pt"})


def main(arguments: list[str] | None = None) -> int:
    """Command line of the conversion. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Rewrite a pickled checkpoint as safetensors; no code of it runs.")
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    try:
        convert(options.path, options.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
