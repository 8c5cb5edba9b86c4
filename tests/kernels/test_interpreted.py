"""Starts `test_triton.py` under Triton's interpreter where there is no GPU to compile for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).with_name("test_triton.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton.py runs compiled")
def test_triton_interpreted():
    pytest.importorskip("triton")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--import-mode=importlib", str(TESTS)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
