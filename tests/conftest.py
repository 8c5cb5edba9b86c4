"""Settings of the whole suite. Models and prompts are in `tiny`, drafters for tests in `doubles`."""

import gc
import os
import sys

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
gc.disable()  # while modules are imported: see pytest_collection_finish
settings.register_profile("visspec", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("visspec")


def pytest_collection_modifyitems(items):
    """What is nightly is slow: `-m "not slow"` leaves out both."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What was imported stays: the garbage of a test is looked for in what came after, and not at every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same global random state, and leaves the number of threads as it was."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unwarped(monkeypatch):
    """Laws in float64: at temperature 1 a warp has nothing to do but to round."""
    for module in ("sampling", "models.drafting.base", "models.jacobi.drafter"):
        monkeypatch.setattr(f"visspec.{module}.warp", lambda logits, sampling: logits)


@pytest.fixture
def hurried():
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def captioner():
    from visspec.api import loading

    try:
        return loading.load(None)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny random model of the painter's kind, as a checkpoint folder, which tests leave as it is."""
    from tests import tiny_images

    where = tmp_path_factory.mktemp("tiny-painter")
    tiny_images.painter(where)
    return where


@pytest.fixture(scope="module")
def pipe(folder):
    from visspec import ImagePipeline

    return ImagePipeline.from_pretrained(str(folder))


@pytest.fixture
def short_bench(monkeypatch):
    """Benches of texts measure one of transformers' assisted modes, behind a warm-up of one prompt."""
    for modes in ("LOOKUP_LENGTHS", "ASSISTANT_LENGTHS"):
        monkeypatch.setattr(f"visspec.cli.bench_caption.{modes}", (3,))
    monkeypatch.setattr("visspec.cli.bench_text.WARMUP", 1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub, which is not asked."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"
