"""Settings of the whole suite. Models and prompts are in `tiny`, drafters for tests in `doubles`."""

import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("visspec", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("visspec")


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same global random state."""
    torch.manual_seed(0)
