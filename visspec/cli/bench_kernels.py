"""`visspec bench kernels`: time and bandwidth of each kernel."""

from dataclasses import dataclass

from visspec.cli.arguments import JsonOption
from visspec.io.options import option


@dataclass(kw_only=True)
class Options(JsonOption):
    device: str = option(default="cpu")
    quick: bool = option("small shapes only", False)


def run(arguments: Options) -> None:
    from visspec.eval.bench import kernels

    kernels.run(arguments.device, arguments.json, arguments.quick)
