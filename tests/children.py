"""Child processes forked from one that has loaded the library, in place of interpreters that each load it again."""

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

LOADED = ["torch", "transformers", "visspec.cli.main", "visspec.cli.caption", "visspec.api.training.drafter"]
START = """
import os, sys
said = os.open({said!r}, os.O_WRONLY | os.O_CREAT, 0o600)
for stream in (1, 2):
    os.dup2(said, stream)
os.environ.update({environment!r})
"""
COMMAND = "from visspec.cli.main import main\nraise SystemExit(main({argv!r}))"


def forked(code: str, said: Path, daemon: bool = True, **environment: str) -> BaseProcess:
    """Run this code in a forked process that writes its output to `said`. A daemon cannot start processes."""
    context = server()
    code = START.format(said=str(said), environment=environment) + code
    process = context.Process(target=exec, args=(code, {"__name__": "__main__"}), daemon=daemon)
    process.start()
    return process


def of_tests(module: str, call: str) -> str:
    """Code that makes a call of a module of the tests, which are no package: another of that name may be installed."""
    return (
        "import sys, types\nfrom pathlib import Path\n"
        f"tests = sys.modules['tests'] = types.ModuleType('tests')\ntests.__path__ = [{str(Path(__file__).parent)!r}]\n"
        f"import tests.{module}\ntests.{module}.{call}\n"
    )


def server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def command(argv: list[str], said: Path) -> BaseProcess:
    return forked(COMMAND.format(argv=argv), said, daemon="--ray" not in argv)
