"""Run the notebooks and store text, results and palette pictures: `python -m tests.run_notebooks [NAME ...]`."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 600  # of each cell
SHADES = 256  # colours of a stored picture


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(notebook, cwd: Path = FOLDER, seconds: int = SECONDS):
    """Run all cells in `cwd`; their outputs are then in the notebook. Raises CellExecutionError where a cell does."""
    where = {"metadata": {"path": cwd}}
    client = NotebookClient(notebook, timeout=seconds, kernel_name="python3", resources=where, record_timing=False)
    return client.execute()


def kept(outputs: list) -> list:
    """Outputs as they are stored: nothing of stderr, text in one piece, pictures with a palette."""
    result: list = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if output.output_type == "stream" and result and result[-1].output_type == "stream":
            result[-1].text += output.text
            continue
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = small(output.data["image/png"])
            output.data.pop("image/jpeg", None)  # of the same picture
        result.append(output)
    return result


def small(png: str) -> str:
    """A PNG in base64 with at most `SHADES` colours."""
    buffer, picture = io.BytesIO(), Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    # the median cut would spend the palette on the ground and lose small shapes' colours
    picture.quantize(SHADES, Image.Quantize.MAXCOVERAGE, kmeans=3).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def store(name: str) -> None:
    """Run a notebook and write it with its outputs over itself."""
    notebook = execute(read(name))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})  # no version of who stored it
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


def main(names: list[str]) -> None:
    for name in names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        store(name)
        print(f"{name}: {(FOLDER / f'{name}.ipynb').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
