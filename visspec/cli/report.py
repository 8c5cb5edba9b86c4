"""`visspec report`: writes an HTML page from the JSON of benches."""

from dataclasses import dataclass
from pathlib import Path

from visspec.io.options import option


@dataclass
class Options:
    result: list[Path] = option("JSON files written by visspec bench", positional=True)
    out: Path = option("the page", Path("report.html"), short="-o", writes="file")


def run(arguments: Options) -> None:
    from visspec.eval.report.page import build

    print(build(arguments.result, arguments.out))
