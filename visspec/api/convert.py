"""Conversion of weights published as pickles in their own layout to a folder that `from_pretrained` loads."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging as transformers_logging

from visspec import registry
from visspec.io import hub
from visspec.io.checkpoint import PICKLED, check_folder, first_line, read_json, read_shapes
from visspec.io.convert_checkpoint import convert as as_safetensors
from visspec.models.chameleon.layout import write_with_codec
from visspec.models.eagle.lantern import family_of_layout
from visspec.models.image_codes.family import family_of
from visspec.models.image_codes.text_features import T5Features
from visspec.registry import DRAFTER

TEXT = "google/flan-t5-xl"  # text encoder of LlamaGen and Infinity


def convert(
    layout: str,
    weights: str | Path,
    out: str | Path,
    *,
    vq: str | Path | None = None,
    text: str | None = None,
    drafter: str | Path | None = None,
    **options: Any,
) -> None:
    """Write an image model to a new folder, with its codec, text encoder and drafter.

    Args:
        layout: A name of `visspec list layouts`; "lantern" for the folder of a drafter; "anole" to add a codec to a
            model in transformers' form, a folder or a hub id; "safetensors" for any pickled weights, which keep their
            names.
        weights: The published file, or a folder of files. Averaged weights are preferred if it contains both.
        out: The new folder.
        vq: The published file or folder of the codec that turns codes into pictures.
        text: Folder or hub id of the text encoder, for models that need one.
        drafter: Folder of a trained drafter for the model, such as LANTERN's.
        options: `size`, the side of the images in pixels, and `heads`, for layouts whose weights do not determine them.

    Raises:
        ValueError: If files are missing or wrong; names the argument. `out` is not created then.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"out: {target} already exists. Choose a new folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as spare,
        _given(spare, weights, vq, drafter),
    ):
        folder = Path(spare, "made")
        if layout == "lantern":
            convert_drafter(Path(weights), folder)
        elif layout == "safetensors":
            if safetensors_of(Path(weights), folder) == Path(weights):
                raise ValueError(f"weights: {weights} holds no pickled weights, expected {', '.join(PICKLED)}.")
        elif layout == "anole":
            if vq is None:
                raise ValueError("vq: got none, expected the published codec of Anole, vqgan.ckpt.")
            write_with_codec(hub.resolve_folder(weights), safetensors_of(Path(vq), Path(spare, "vq")), folder)
        else:
            model, processor = _load(layout, Path(weights), vq, text, Path(spare), options)
            model.save_pretrained(folder)
            if processor is not None:
                processor.save_pretrained(folder)
            if drafter is not None:
                convert_drafter(Path(drafter), folder / DRAFTER)
                # fails for a drafter of another model
                registry.from_folder(folder / DRAFTER, model, {}, family_of(model, processor))
        if target.exists():
            target.rmdir()
        folder.rename(target)


@contextmanager
def _given(spare: str, weights: str | Path, vq: str | Path | None, drafter: str | Path | None) -> Iterator[None]:
    """Replace temporary files in `spare` by their sources in error messages."""
    try:
        yield
    except ValueError as error:
        names = {"weights": weights, "vq": vq, "drafter-weights": drafter or weights, "made": drafter or weights}
        raise ValueError(
            re.sub(rf"{re.escape(str(Path(spare)))}/([\w-]+)\S*", lambda m: str(names[m[1]]), str(error))
        ) from None


def convert_drafter(folder: Path, out: Path) -> None:
    """Write a published drafter of image codes as safetensors. Raises ValueError for any other folder."""
    folder = hub.resolve_folder(folder)
    if not folder.is_dir():
        raise ValueError(f"drafter: got {folder}, expected the folder of a published drafter, with config.json.")
    shutil.copytree(safetensors_of(folder, out.parent / "drafter-weights"), out)
    entries = registry.table("drafter").values()
    data = read_json(check_folder(out), "config.json")
    ours = data.get("kind") in {entry.checkpoint for entry in entries if entry.checkpoint}
    if not ours and family_of_layout(data, set(read_shapes(out))) is None:
        raise ValueError(f"drafter: {folder} is not a drafter of image codes by LANTERN or by visspec.")


def _load(
    layout: str, weights: Path, vq: str | Path | None, text: str | None, spare: Path, options: dict[str, Any]
) -> tuple[Any, Any]:
    entry = registry.find("layout", layout)
    if vq is None:
        raise ValueError(f"vq: got none, expected the published codec of {layout} ({entry.what}).")
    reader = entry.load()
    arguments = {name: value for name, value in options.items() if value is not None}
    if strange := sorted(arguments.keys() - signature(reader).parameters.keys()):
        raise ValueError(f"{strange[0]}: The weights of {layout} determine it. Leave it out.")
    paths = []
    for argument, path in (("weights", weights), ("vq", Path(vq))):
        if not path.exists():
            raise ValueError(f"{argument}: {path} does not exist, expected a published file or folder ({entry.what}).")
        paths.append(safetensors_of(path, spare / argument))
    model = reader(*paths, **arguments)
    if model.text_features:
        return model, _encoder(text, model.text_features, layout)
    if text is not None:
        raise ValueError(f"text: {layout} has no separate text encoder. Leave it out.")
    if model.class_conditional:
        return model, None
    return model, transformers.AutoTokenizer.from_pretrained(str(weights), local_files_only=True)


def _encoder(text: str | None, width: int, layout: str) -> T5Features:
    if text is None:
        raise ValueError(f"text: got none, expected the text encoder that {layout} was trained with (--text {TEXT}).")
    try:
        features = T5Features.from_pretrained(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"text: {text} could not be loaded as a text encoder, {first_line(error)}") from None
    if (size := features.encoder.config.hidden_size) != width:
        raise ValueError(f"text: {text} has {size} features, expected {width} as in {TEXT}.")
    return features


def safetensors_of(path: Path, spare: Path) -> Path:
    """Return the path, or for pickles a conversion in the new folder `spare`. Raises ValueError if it is missing."""
    if not path.exists():
        raise ValueError(f"convert: {path} does not exist, expected a published file or folder.")
    files = [path] if path.is_file() else [*path.iterdir()]
    pickled = [file for file in files if file.suffix in PICKLED]
    if not pickled or any(file.suffix == ".safetensors" for file in files):
        return path
    spare.mkdir(parents=True)
    for file in pickled:
        as_safetensors(file, spare / f"{file.stem}.safetensors")
    for file in files:
        if file.suffix == ".json":
            shutil.copy(file, spare)
    return spare / f"{path.stem}.safetensors" if path.is_file() else spare
