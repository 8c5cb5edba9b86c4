"""Settings of the whole suite. Models and prompts are in `tiny`, drafters for tests in `doubles`."""

import gc
import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

NEED_TOYS = """
eval/test_emoji.py eval/test_fid.py eval/test_geneval.py eval/test_world.py
test_any_order_painter.py test_any_order_presets.py
test_caption_records.py test_cli.py test_cli_eval.py
test_distilled.py test_drafter_contract.py test_eagle.py test_generate_inpainting.py test_held_out.py
test_dry_run.py test_habits_stream.py test_included.py
test_mar_painter.py test_notebooks.py test_package.py test_painter.py
test_painter_folders.py test_ray.py
test_scale_painter.py test_serve.py test_train.py test_train_processes.py
test_tune.py test_verdict.py test_world.py
""".split()  # files that need the included models or their worlds: left out where `visspec/toys` is deleted
collect_ignore = NEED_TOYS if find_spec("visspec.toys") is None else []
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
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


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same global random state, and leaves the number of threads as it was."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def captioner():
    from visspec.api import loading

    try:
        return loading.load(None)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model of the painter's kind, as a checkpoint folder."""
    from tests import tiny_images

    where = tmp_path_factory.mktemp("tiny-painter")
    tiny_images.painter(where)
    return where


@pytest.fixture(scope="module")
def pipe(folder):
    from visspec import ImagePipeline

    return ImagePipeline.from_pretrained(str(folder))
