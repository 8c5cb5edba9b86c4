"""The wheel that users install: everything is in it and found from there, not only from a checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_layers import imports_of, sources
from visspec.cli import demo, doctor
from visspec.io import included

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 75_000_000  # bytes of a wheel; package indexes refuse more than 100 MB
HELD_OUT = "visspec/toys/heldout"
PARTS = ("visspec", "models", "kernels", "eval", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def copied(source: Path, *without: str) -> Path:
    """What a package is built from, in a folder of its own; `without` are patterns of files left out."""
    source.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", *without))
        else:
            shutil.copy(ROOT / part, source / part)
    return source


def packaged() -> set[str]:
    """The included models that a wheel holds: those of the demo, and their drafters."""
    shown = {captioner for captioner, _ in demo.WORLDS.values()} | set(demo.PAINTERS)
    left_out = ("assistant", "distilled", "lowres", "upsampler")
    models = included.table().models.items()
    published = {name for name, row in models if row.kind and not row.target}  # drafters of published weights
    return shown | published | {name for name, row in models if row.target in shown and row.kind not in left_out}


def test_readme_models_in_wheel():
    readme = (ROOT / "README.md").read_text()
    assert {name for name in included.table().models if f'"{name}"' in readme} <= packaged()
    assert "`models/zoo`" in readme, "where the others are"


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_build(kind, tmp_path):
    source = copied(tmp_path / "source", "*.safetensors")
    program = f"import sys; from setuptools import build_meta as b; print(b.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-P", "-W", "always", "-c", program, str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # of which builds warn
    run = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr and "****" not in run.stderr  # the frame around setuptools' warnings
    if kind == "wheel":
        wheel = zipfile.ZipFile(tmp_path / run.stdout.splitlines()[-1])
        held = wheel.namelist()
        data = [file for name in packaged() for file in included.folder(name).iterdir()]
        data += (ROOT / "eval" / "report" / "templates").iterdir()
        left_out = (".safetensors", ".pyc")
        expected = {f"visspec/{p.relative_to(ROOT)}" for p in data if p.is_file() and p.suffix not in left_out}
        expected |= {f"visspec/toys/world/emoji/{name}" for name in ("atlas.json", "atlas.webp", "OFL.txt")}
        expected |= {f"visspec/{file.relative_to(ROOT / 'visspec')}" for file in (ROOT / HELD_OUT).glob("*/*")}
        expected |= {f"visspec/{file.relative_to(ROOT)}".replace("visspec/visspec", "visspec") for file, _ in sources()}
        assert expected and expected <= set(held)
        zoo = [name.split("/") for name in held if name.startswith("visspec/models/zoo/")]
        folders = {parts[3] for parts in zoo if len(parts) > 4}
        assert folders == {included.folder(name).name for name in packaged()}
        weights = [file for name in packaged() for file in included.folder(name).glob("*.safetensors")]
        packed = sum(len(zlib.compress(file.read_bytes(), 1)) for file in weights)
        assert Path(wheel.filename).stat().st_size + packed <= LARGEST
        wheel.extractall(tmp_path / "site")
        assert_found_in(tmp_path / "site", tmp_path, "")


def assert_found_in(site: Path, cwd: Path, further: str) -> str:
    """The package and its checkpoints are found in `site`, missing weights are named; output of the lines `further`."""
    program = (
        "import sys, visspec, visspec.registry as registry\n"
        f"assert visspec.__file__.startswith({str(site)!r}), visspec.__file__\n"
        f"assert str(registry.CHECKPOINTS).startswith({str(site)!r}), registry.CHECKPOINTS\n"
        "try:\n    registry.included_folder('painter-mar')\n"
        "except ValueError as missing:\n    print(missing, file=sys.stderr)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-P", "-c", program + further]
    run = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (missing,) = [line for line in run.stderr.splitlines() if "painter-mar" in line]
    assert "are not in" in missing and "The repository has them" in missing
    return run.stdout


@pytest.mark.parametrize("installed", ["", "editable"])
def test_checkout_before_package(installed, tmp_path):
    """In the repository root, plain python takes ./visspec and the models, kernels and eval beside it."""
    shutil.copytree(ROOT / "visspec", tmp_path / "visspec", ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("models", "models/zoo", "kernels", "eval"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").write_text("")
    program = (
        "import sys\n"
        f"sys.meta_path = [f for f in sys.meta_path if {bool(installed)} or 'editable' not in f.__module__]\n"
        "import visspec, visspec.models, visspec.kernels, visspec.eval\n"
        "print(visspec.__file__, visspec.models.__file__)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / part / "__init__.py") for part in ("visspec", "models")]


@pytest.mark.nightly
def test_installed_wheel(tmp_path):
    source, site = copied(tmp_path / "source"), tmp_path / "site"
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size <= LARGEST
    install = [*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    further = (
        "from visspec.cli.main import main\n"
        "from visspec.io import included\n"
        "included.scenes('shapes').images(1)[0].save('scene.png')\n"
        "sys.exit(main(['caption', 'scene.png']))\n"
    )
    assert "shapes" in assert_found_in(site, tmp_path, further)


NOT_IMPORTED = {  # by our code
    "torchvision",  # transformers' image processors import it
    "pytest-xdist", "pytest-timeout", "ruff", "mypy",  # tools of the Makefile
    "ipykernel",  # runs the notebooks
    "timm",  # vision towers of some classes of transformers
}  # fmt: skip


SKIPPED = re.compile(r"\b(?:pytest\.importorskip|bits)\(\"(\w+)")  # of tests that need a package


def test_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, *extras = [
        {re.match(r"[\w-]+", line)[0] for line in lines}
        for lines in (project["dependencies"], *project["optional-dependencies"].values())
    ]
    folders = [ROOT / part for part in ("visspec", "models", "kernels", "eval", "tests")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    imported = {path[0] for file in files for path in imports_of(file)}
    skipped = {name for file in files for name in SKIPPED.findall(file.read_text())}
    odd = {"pillow": "PIL", "lm-format-enforcer": "lmformatenforcer", "optimum-quanto": "optimum"}
    names = {name: odd.get(name, name.replace("-", "_")) for name in needed.union(*extras)}
    idle = {name for name, module in names.items() if module not in imported | skipped}
    assert idle == NOT_IMPORTED and needed == set(doctor.NEEDED)


def test_documented_modules():
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("DOCUMENTED")]
    names = re.search(r"addprefix visspec\.,(.*)\)", line)[1].split()
    assert names and all(find_spec(f"visspec.{name}") for name in names)
