"""How many mutants of the core do the tests kill? `make mutants`, or `python tests/mutants --help`.

First every test file runs once, to note which functions of the core each test calls and how long it takes. A mutant is
then judged in a process forked from one that has torch and transformers loaded but nothing of ours: its module is
imported from the changed source, and the tests that call the changed function run, files with little to do first, until
one fails. Results are kept line by line: a run that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

from candidates import NAMED, ROOT, Mutant, chosen, core

TESTS = ("tests/test_*.py", "tests/eval/test_fid.py")
ELSEWHERE = {"notebooks", "package", "provenance", "layers", "world", "cli", "painter", "mutants", "loaders"}
PYTEST = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist", "-m", "not slow and not gpu"]
OWN = ("visspec", "tests", "conftest", "__main__", "candidates")


class Watch:
    """A pytest plugin: seconds of each passed test, and which functions of the core it called."""

    def __init__(self):
        self.files = {str(ROOT / path): path for path in {*core(), *(path for _, path, *_ in NAMED)}}
        self.tests: dict[str, dict] = {}
        self.failed = 0

    def _called(self, frame, event, argument):
        if (path := self.files.get(frame.f_code.co_filename)) is not None:
            self.calls.add(f"{path} {frame.f_code.co_qualname.replace('.<locals>', '')}")

    def pytest_runtest_logstart(self, nodeid, location):
        self.calls: set[str] = set()
        self.begun = time.process_time()
        threading.settrace(self._called)
        sys.settrace(self._called)

    def pytest_runtest_logreport(self, report):
        self.failed += report.failed
        if report.when == "call" and report.passed:
            self.tests[report.nodeid] = {}

    def pytest_runtest_logfinish(self, nodeid, location):
        sys.settrace(None)
        threading.settrace(None)
        if nodeid in self.tests and self.calls:
            self.tests[nodeid] = {"seconds": time.process_time() - self.begun, "calls": sorted(self.calls)}


class Quickest:
    """A pytest plugin: tests in the order given, and which one failed."""

    def __init__(self, order: list[str]):
        self.place, self.failed = {test: i for i, test in enumerate(order)}, ""

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.place.get(item.nodeid, len(self.place)))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid


class Changed(SourceFileLoader):
    """Finds and loads one module from the source of a mutant."""

    def __init__(self, mutant: Mutant):
        super().__init__(mutant.module, str(ROOT / mutant.path))
        self.changed = mutant.source()

    def find_spec(self, name: str, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, name: str):
        return compile(self.changed, self.path, "exec")


def watched(path: Path) -> dict:
    """Run a test file: what its tests call, and the modules of others that they need."""
    import pytest

    watch = Watch()
    pytest.main([*PYTEST, str(path)], plugins=[watch])
    modules = [name for name in sys.modules if name.split(".")[0] not in OWN]
    return {"tests": {k: v for k, v in watch.tests.items() if v}, "modules": modules, "failed": watch.failed}


def judged(mutant: Mutant, tests: dict[str, list[str]]) -> dict:
    """The first test that fails under a mutant."""
    import pytest

    sys.meta_path.insert(0, Changed(mutant))
    try:
        importlib.import_module(mutant.module)
    except Exception as error:
        return {"killed": f"import: {type(error).__name__}"}
    for ids in tests.values():
        quickest = Quickest(ids)
        code = pytest.main([*PYTEST, "-x", *ids], plugins=[quickest])
        if code != 0:
            return {"killed": quickest.failed or f"pytest: {code.name}"}
    return {"killed": ""}


def forked(items: Iterable, work: Callable, jobs: int, seconds: int) -> Iterator[tuple]:
    """(item, work(item)), each worked out in a child of this process; None where that took too long or died."""
    items, running = iter(items), {}
    while True:
        while len(running) < jobs and (item := next(items, None)) is not None:
            answer = tempfile.TemporaryFile("w+")
            if not (child := os.fork()):
                signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the child, whatever it is doing; and if it waits:
                signal.alarm(10 * seconds)
                for stream in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
                try:
                    json.dump(work(item), answer)
                    answer.flush()
                finally:
                    os._exit(0)
            running[child] = item, answer
        if not running:
            return
        item, answer = running.pop(os.wait()[0])
        answer.seek(0)
        text = answer.read()
        yield item, json.loads(text) if text else None


def record(folder: Path, jobs: int, only: str) -> dict[str, dict]:
    """What every test calls; noted anew for files that changed, and for those in which a test failed."""
    kept = folder / "tests.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    files = [p for pattern in TESTS for p in sorted(ROOT.glob(pattern))]
    files = [p for p in files if p.stem.removeprefix("test_") not in ELSEWHERE and re.search(only, p.stem)]
    digest = {path: hashlib.sha1(path.read_bytes()).hexdigest() for path in files}
    stale = [p for p in files if known.get(str(p), {"failed": 1})["failed"] or known[str(p)]["digest"] != digest[p]]
    for path, found in forked(stale, watched, jobs, 1800):
        known[str(path)] = {"digest": digest[path], **(found or {"tests": {}, "modules": [], "failed": 1})}
        kept.write_text(json.dumps(known))
        noted = known[str(path)]
        print(f"{path.name}: {len(noted['tests'])} tests of the core, {noted['failed']} failed", flush=True)
    return {str(path): known[str(path)] for path in files}


def concerned(mutant: Mutant, tests: dict[str, dict], budget: float) -> dict[str, list[str]]:
    """The tests for a mutant, by file: those that call its function, then others of its module, the quickest first."""
    near, own = f"{mutant.path} {mutant.function}", f"{mutant.path} "
    ranked = []
    for name, test in tests.items():
        if any(call.startswith(own) for call in test["calls"]):
            ranked.append((near not in test["calls"], test["seconds"], name))
    files, spent = defaultdict(list), defaultdict(float)
    for _, seconds, name in sorted(ranked):
        if sum(spent.values()) + seconds <= budget:
            files[name.split("::")[0]].append(name)
            spent[name.split("::")[0]] += seconds
    return {file: files[file] for file in sorted(files, key=spent.get)}


def report(mutants: list[Mutant], results: dict[str, dict]) -> str:
    """The score by file, and the survivors."""
    groups = defaultdict(list)
    for mutant in mutants:
        if mutant.key in results:
            groups[mutant.path].append(results[mutant.key]["killed"])
    lines = ["| file | mutants | killed |", "|---|---|---|"]
    lines += [f"| `{path}` | {len(found)} | {sum(map(bool, found))} |" for path, found in sorted(groups.items())]
    every = [killed for found in groups.values() for killed in found]
    lines.append(f"| all | {len(every)} | {sum(map(bool, every))} ({sum(map(bool, every)) / max(len(every), 1):.0%}) |")
    alive = [m.key for m in mutants if m.key in results and not results[m.key]["killed"]]
    return "\n".join([*lines, "", *(f"* `{key}`" for key in alive)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=250, help="mutants (250)")
    parser.add_argument("--seed", type=int, default=0, help="which of the candidates")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (1)")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests for a mutant (30)")
    parser.add_argument("--only", default="", help="a regular expression: mutants whose description has it")
    parser.add_argument("--tests", default="", help="the same: test files whose name has it")
    parser.add_argument("--again", action="store_true", help="judge those again that survived (by a larger budget)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants", help="where results are kept")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    for name in ("torch", "transformers", "pytest", "hypothesis", "scipy.stats"):
        importlib.import_module(name)
    files = record(options.out, options.jobs, options.tests)
    for name in sorted({name for file in files.values() for name in file["modules"]}):
        try:
            importlib.import_module(name)
        except Exception:
            continue  # a module that only exists under a test
    tests = {name: test for file in files.values() for name, test in file["tests"].items()}
    mutants = [m for m in chosen(options.count, options.seed) if re.search(options.only, m.key)]
    kept = options.out / "results.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    results = {line["key"]: line for line in lines}
    todo = [m for m in mutants if m.key not in results or (options.again and not results[m.key]["killed"])]
    limit = int(60 + 3 * options.budget)
    begun = time.time()
    work = forked(todo, lambda m: judged(m, concerned(m, tests, options.budget)), options.jobs, limit)
    for n, (mutant, found) in enumerate(work, 1):
        results[mutant.key] = {"key": mutant.key, **(found or {"killed": "took too long"})}
        with kept.open("a") as file:
            print(json.dumps(results[mutant.key]), file=file)
        word = results[mutant.key]["killed"] or "SURVIVED"
        print(f"{n}/{len(todo)} {time.time() - begun:.0f} s  {mutant.key}\n    {word}", flush=True)
    print(report(mutants, results))


main()
