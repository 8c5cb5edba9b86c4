"""The notebooks run from top to bottom, say what they promise, and are kept with the outputs that a run gives."""

import ast
import base64
import io
import re
from itertools import islice
from types import ModuleType

import nbformat
import pytest
from PIL import Image

from tests.run_notebooks import FOLDER, execute, kept, read
from visspec import registry

SECONDS = 300  # of each notebook, on two cores
CAPTIONER = (registry.CHECKPOINTS / "captioner" / "config.json").is_file()
PROMISES = {  # words that the outputs must hold
    "01_caption_your_photos": ["same tokens: True", "<span style=", "25 records, 25 different ids", "exit code 1",
                               "records are unchanged: True", "as in the file: True"],
    "02_draw": ["the same codes: True", "guarantee: exact", "grouped:group=14", "calls of the head per token"],
    "03_write_a_drafter": ["3 rows: same ids", "out of ideas", "by name: True"],
    "04_train_a_drafter": ["my-drafter", "same tokens: 4 of 4"],
    "05_the_loop_and_its_guarantees": ["tau 1.00 in 59 rounds", "the mistaken rule is off by", "exact: acceptance"],
}  # fmt: skip
# cells whose words depend on the clock, or on where two chains of numbers part by rounding
CLOCKED = {"01-05", "01-13", "02-04", "02-06", "04-04"}
PICTURE = 60_000  # bytes of a stored picture, at most
SIDE = 256  # pixels, at least
NEED_WEIGHTS = {"01_caption_your_photos", "02_draw", "04_train_a_drafter"}
SHORT = ("03_write_a_drafter", "05_the_loop_and_its_guarantees")
LONG = sorted(set(PROMISES) - set(SHORT))


def printed(notebook) -> str:
    """All text that the cells wrote: streams, results, displays."""
    result = ""
    for output in (o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs):
        result += output.get("text", "")  # a kernel may send one line in two pieces
        result += "".join(f"\n{text}\n" for kind, text in output.get("data", {}).items() if kind.startswith("text/"))
    return result


def test_every_notebook_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PROMISES)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell) -> list[tuple[str, ...]]:
    """What kinds of output a cell has, and its words: numbers with a point may differ between machines."""
    result = []
    for output in kept(cell.outputs):
        text = output.get("text", output.get("data", {}).get("text/plain", ""))
        words = "" if cell.id in CLOCKED else " ".join(re.sub(r"\d+\.\d+(e-?\d+)?", "#", text).split())
        result.append((output.output_type, *sorted(output.get("data", {})), words))
    return result


@pytest.mark.parametrize("name", PROMISES)
def test_kept_with_outputs_and_short(name):
    notebook = read(name)
    nbformat.validate(notebook)
    code = code_cells(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "make notebooks"
    assert all(words in printed(notebook) for words in PROMISES[name])
    outputs = [output for cell in code for output in cell.outputs]
    assert all(o.output_type != "error" and o.get("name") != "stderr" for o in outputs)
    assert not re.search(r"/(tmp|home|root|work|Users)/", printed(notebook)), "a path of the machine that ran it"
    for picture in (o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})):
        image = Image.open(io.BytesIO(base64.b64decode(picture)))
        assert len(picture) < PICTURE and image.mode == "P" and min(image.size) >= SIDE
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    assert len(notebook.cells) <= 20 and max(len(cell.source.splitlines()) for cell in code) <= 45


@pytest.mark.parametrize("name", PROMISES)
def test_names_from_modules(name):
    """Also of those that run every night alone."""
    tree, result = ast.parse("\n".join(cell.source for cell in code_cells(read(name)))), {}
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), name, "exec"), result)
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    taken = [node for node in taken if isinstance(result.get(node.value.id), ModuleType)]
    assert imports and taken
    assert all(hasattr(result[node.value.id], node.attr) for node in taken)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("names", [SHORT, *(pytest.param((name,), marks=pytest.mark.nightly) for name in LONG)])
def test_runs(names):
    """The short ones in one kernel, which forgets the names of one before the next."""
    if NEED_WEIGHTS & set(names) and not CAPTIONER:
        pytest.skip("the embedded captioner's weights are not in this checkout")
    before, one = set(FOLDER.iterdir()), read(names[0])
    one.cells = [cell for name in names for cell in (nbformat.v4.new_code_cell("%reset -f"), *read(name).cells)]
    cells = iter(execute(one, seconds=SECONDS).cells)
    for name in names:
        assert next(cells).source == "%reset -f"
        stored = read(name)
        ran = nbformat.v4.new_notebook(cells=list(islice(cells, len(stored.cells))))
        for words in PROMISES[name]:
            assert words in printed(ran), words
        for before_cell, cell in zip(code_cells(stored), code_cells(ran), strict=True):
            assert shown(before_cell) == shown(cell), "make notebooks"
    assert set(FOLDER.iterdir()) == before, "a notebook must not write beside itself"
