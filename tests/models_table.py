"""Makes `docs/models.md`: python -P tests/models_table.py [--workers 2] [--out FILE] [--json FILE] [class ...]."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import types
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
# as pytest does; with the root itself on the path, transformers could take kernels/ for a package of that name
sys.modules.setdefault("tests", types.ModuleType("tests")).__path__ = [str(HERE)]

from tests import sweep, tiny_classes  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names, rows = arguments.names or tiny_classes.generating(), []
    for taken, found in sweep.sweep(names, arguments.workers):
        rows += found
        for row in found:
            print(f"{row.name:50} {row.inputs:12} {row.outcome:12} {taken:5.1f} s  {row.reason}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if arguments.out:
        arguments.out.write_text(sweep.page(rows, datetime.date.today().isoformat()))


main()
