"""Triton tests: compiled on a GPU, else interpreted in a process of their own, since TRITON_INTERPRET is global."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["test_triton.py"]


@pytest.fixture(autouse=True)
def _one_thread(_seeded):
    torch.set_num_threads(1)
