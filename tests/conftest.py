"""Settings of the whole suite. Models and prompts are in `tiny`, drafters for tests in `doubles`."""

import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("visspec", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("visspec")


def pytest_collection_modifyitems(items):
    """What is nightly is slow: `-m "not slow"` leaves out both."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same global random state."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model of the painter's kind, as a checkpoint folder."""
    from tests import tiny_images

    where = tmp_path_factory.mktemp("tiny-painter")
    tiny_images.painter(where)
    return where


@pytest.fixture(scope="module")
def pipe(folder):
    """A quiet pipeline of it."""
    from visspec import ImagePipeline

    found = ImagePipeline.from_pretrained(str(folder))
    found.set_progress_bar_config(disable=True)
    return found
