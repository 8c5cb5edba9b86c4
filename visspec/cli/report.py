"""`visspec report`: one HTML page from the JSON of benches."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("result", nargs="+", type=Path, help="JSON files written by visspec bench")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"))


def run(arguments: argparse.Namespace) -> None:
    from visspec.eval.report.page import build

    print(build(arguments.result, arguments.out))
