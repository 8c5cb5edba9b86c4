"""`visspec bench kernels`: time and bandwidth of each kernel."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    parser.add_argument("--json", type=Path)


def run(arguments: argparse.Namespace) -> None:
    from visspec.eval.bench import kernels

    kernels.run(arguments.device, arguments.json, arguments.quick)
