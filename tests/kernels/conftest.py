"""Triton tests run compiled where there is a GPU, interpreted in a process of their own where there is none.

TRITON_INTERPRET must be set before Triton is first imported, and must not reach the rest of the suite.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["test_triton.py"]


@pytest.fixture(autouse=True)
def _one_thread(_seeded):
    torch.set_num_threads(1)
