"""The notebooks run from top to bottom, say what they promise, and are kept without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from visspec import zoo

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SECONDS = 300  # of each notebook, on two cores
CAPTIONER = (zoo.CHECKPOINTS / "captioner" / "config.json").is_file()
PROMISES = {  # words that the outputs must hold
    "01_the_loop_on_a_toy_law": ["tau 1.00 in 59 rounds", "the mistaken rule is off by"],
    "02_caption_with_a_vlm": ["<span style=", "tau", "approximate", "drift a token 0.0000"],
    "03_write_a_drafter_in_forty_lines": ["3 rows: same ids", "out of ideas"],
    "05_generate_an_image": ["the same codes: True", "guarantee: exact", "grouped:group=10"],
    "04_speed_and_quality_of_your_own_model": ["same tokens: 4 of 4", "after_host", "report.html"],
}
NEED_WEIGHTS = {"02_caption_with_a_vlm", "04_speed_and_quality_of_your_own_model", "05_generate_an_image"}


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(notebook, cwd: Path = FOLDER):
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": cwd}})
    return client.execute()


def printed(notebook) -> str:
    """All text that the cells wrote: streams, results, displays."""
    found = []
    for output in (o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs):
        found.append(output.get("text", ""))
        found += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(found)


def test_every_notebook_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_kept_without_outputs_and_short(name):
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    assert len(notebook.cells) <= 20 and max(len(cell.source.splitlines()) for cell in code) <= 45


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", PROMISES)
def test_runs(name):
    if name in NEED_WEIGHTS and not CAPTIONER:
        pytest.skip("the embedded captioner's weights are not in this checkout")
    before = set(FOLDER.iterdir())
    text = printed(execute(read(name)))
    for words in PROMISES[name]:
        assert words in text, words
    assert set(FOLDER.iterdir()) == before, "a notebook must not write beside itself"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NEED_WEIGHTS))
def test_stops_with_a_sentence_where_the_weights_are_missing(name, tmp_path):
    notebook = read(name)
    point = nbformat.v4.new_code_cell(
        f"from visspec import zoo\nzoo.CHECKPOINTS = __import__('pathlib').Path('{tmp_path}')"
    )
    notebook.cells = [point, *notebook.cells]
    with pytest.raises(CellExecutionError, match="weights are not in this checkout"):
        execute(notebook)
