"""`visspec export`: a trained drafter in the form of other engines."""

from dataclasses import dataclass
from pathlib import Path

from visspec.io.options import HardwareOptions, option


@dataclass(kw_only=True)
class Options(HardwareOptions):
    folder: Path = option("folder of the drafter", positional=True)
    form: str = option("form: eagle, eagle3, dflash, dflash2, dspark, domino, speculators or transformers")
    out: Path = option(writes="folder")
    target: str | None = option("folder or hub id of its target (default: the one that it was trained for)", None)


def run(arguments: Options) -> None:
    from visspec.api.training.export import export

    name = export(arguments.folder, arguments.form, arguments.out, arguments.target, **arguments.hardware)
    print(f"{arguments.out}: {arguments.form}, a drafter for {name}")
