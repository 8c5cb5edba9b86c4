"""The wheel that users install: everything is in it and found from there, not only from a checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("visspec", "models", "kernels", "eval", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.mark.slow
def test_an_installed_wheel_finds_its_checkpoints_and_captions(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(source)]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    program = (
        "import sys, visspec, visspec.zoo as zoo\n"
        f"assert visspec.__file__.startswith({str(site)!r}), visspec.__file__\n"
        f"assert str(zoo.CHECKPOINTS).startswith({str(site)!r}), zoo.CHECKPOINTS\n"
        "from visspec.cli import main\n"
        "from visspec.eval.world.render import to_image\n"
        "from visspec.eval.world.scene import HELD_OUT_SEED, scene_from_seed\n"
        "to_image(scene_from_seed(HELD_OUT_SEED)).save('scene.png')\n"
        "sys.exit(main(['caption', 'scene.png']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "shapes" in run.stdout
