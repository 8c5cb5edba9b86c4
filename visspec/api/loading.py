"""Loading of models and processors by name, folder or hub id, for the command line."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from visspec import registry
from visspec.api.sources import need
from visspec.io import checkpoint, hub, included
from visspec.models.image_codes import text_features
from visspec.models.layers import load_exactly, quiet

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

SPREAD = {  # transformers' plans for several devices
    "balanced": {"device_map": "balanced"},
    "tp": {"tp_plan": "auto"},
}
KINDS = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM  # classes that generate text
INSTEAD = {  # by `model_type` of the authors' form: the model in transformers' form
    "multi_modality": "deepseek-community/Janus-Pro-1B",
    "Emu3": "BAAI/Emu3-Gen-hf",
}
logger = logging.getLogger(__name__)


def load(
    spec: str | None = None,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    needs_pictures: bool = False,
):
    """Load a model for `accelerate`, with its processor, or its tokenizer for a text model.

    Args:
        spec: Name of an included model (None: one that captions), a folder or a hub id.
        device: A torch device. "auto": the GPU if there is one; "balanced" (`device_map`): layers distributed over all
            devices; "tp" (`tp_plan`): each layer split over torchrun's processes.
        dtype: Name or torch dtype.
        trust_remote_code: Whether to run code of the checkpoint.
        needs_pictures: Reject text models.

    Raises:
        ValueError: If the checkpoint has pickled weights, missing, extra or mis-shaped tensors, or files outside its
            folder, or the model does not generate text.
    """
    where = spec or included.text_model()
    form = _configuration(where).get("model_type")
    if form in registry.table("family") and (included.is_included(where) or form not in transformers.CONFIG_MAPPING):
        raise ValueError(
            f"model: {where} draws images and writes no text. Use `visspec generate` to draw with it, and"
            " `visspec bench image` to measure it."
        )
    kind = _kind(where, trust_remote_code)
    if needs_pictures and kind is transformers.AutoModelForCausalLM:
        raise ValueError(
            f"model: {where} generates text and sees no pictures. Use `visspec bench text` to measure it,"
            " `visspec tune --prompts` to tune it, and `visspec serve` for its answers."
        )
    return _load(where, kind, device, dtype, trust_remote_code)


def is_text_model(spec: str, trust_remote_code: bool = False) -> bool:
    """Return whether the configuration of a folder or hub id is that of a text-only model."""
    return _kind(spec, trust_remote_code) is transformers.AutoModelForCausalLM


def load_image_model(
    spec: str | None = None, *, device: str = "auto", dtype: str | torch.dtype = "auto", trust_remote_code=False
):
    """Load (model, processor) of an image generator for `ImagePipeline`. Arguments and errors are those of `load`."""
    where = str(spec or included.image_model())
    config = _configuration(where)
    family = registry.table("family").get(str(config.get("model_type")))
    if family is not None and (reader := family.load().load) is not None:
        device, folder = resolve_device(device), hub.resolve_folder(registry.included_folder(where))
        usual = torch.float32 if device == "cpu" else getattr(torch, config.get("dtype") or "float32")
        model = reader(folder, torch_dtype(dtype, usual)).to(device).eval()
        logger.info("%s: loaded %s, %s, to %s", folder, type(model).__name__, model.dtype, device)
        with quiet():  # suppresses the warning about the unknown model type
            return model, None if model.class_conditional else _own_processor(model, folder)
    named = config.get("architectures") or [""]
    kind = getattr(transformers, named[0], None) or transformers.AutoModelForMultimodalLM
    return _load(where, kind, device, dtype, trust_remote_code)


def _configuration(where: str) -> dict[str, Any]:
    """Return the config.json of a model, if any. Raises ValueError with advice for a form that can't be read."""
    folder, local = locate(where)
    files = [Path(where)] if Path(where).is_file() else list(Path(where).glob("*"))
    if not any(file.name == "config.json" for file in files) and any(f.suffix in checkpoint.PICKLED for f in files):
        raise ValueError(
            f"model: {where} holds weights in their authors' layout. `visspec convert` makes a folder of them that"
            " can be loaded (visspec list layouts)."
        )
    try:
        file = cached_file(folder, "config.json", local_files_only=local, _raise_exceptions_for_missing_entries=False)
    except OSError:
        file = None
    if file is None:
        return {}
    config = checkpoint.read_json(Path(file).parent, "config.json")
    kind = str(config.get("model_type"))
    if kind in INSTEAD:
        raise ValueError(f"model: {where} is in its authors' form. Use {INSTEAD[kind]}, in transformers' form.")
    if not ("auto_map" in config or kind in transformers.CONFIG_MAPPING or kind in registry.table("family")):
        raise ValueError(
            f"model: {where} is of the type {kind!r}, which transformers {transformers.__version__} does not know. A"
            " newer one may, and `visspec convert` reads some layouts of their authors (visspec list layouts)."
        )
    return config


def load_diffusers(where: str, *, device: str = "auto", dtype: str | torch.dtype = "auto") -> DiffusionPipeline | None:
    """Load the diffusers pipeline of a folder or hub id in its layout (`model_index.json`), or return None for others.
    Only safetensors are read, and no remote code is run. dtype "auto" is float32 on a CPU, else bfloat16. Raises
    ValueError for a pipeline without an autoregressive stage.
    """
    if not (Path(where).is_dir() or hub.names(where)):
        return None
    included.check_model(where)
    try:
        index = cached_file(where, "model_index.json", _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such repository: transformers reports it when the model is loaded
        index = None
    if index is None:
        return None
    folder = Path(index).parent
    for path in folder.rglob("*"):
        checkpoint.inside(folder, str(path.relative_to(folder)))
    kind = checkpoint.read_json(folder, "model_index.json").get("_class_name")
    if kind != "GlmImagePipeline":
        raise ValueError(f"model: got diffusers' {kind}, expected GlmImagePipeline: it has an autoregressive stage.")
    from diffusers import DiffusionPipeline  # importing it takes seconds

    device = resolve_device(device)
    precision = torch_dtype(dtype, torch.float32 if device == "cpu" else torch.bfloat16)
    return DiffusionPipeline.from_pretrained(where, torch_dtype=precision, use_safetensors=True).to(device)


def load_saved(where: str, *, device: str = "auto", dtype: str | torch.dtype = "auto", trust_remote_code: bool = False):
    """Load (model, processor or tokenizer, or None if it has neither) from a folder with any generative model."""
    named = checkpoint.read_json(checkpoint.check_folder(where), "config.json").get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    kind = getattr(transformers, first, None) or transformers.AutoModelForImageTextToText
    worded = any((Path(where) / name).is_file() for name in ("tokenizer_config.json", "processor_config.json"))
    return _load(where, kind, device, dtype, trust_remote_code, worded)


def _kind(spec: str, trust_remote_code: bool) -> Any:
    where, local = locate(spec)
    try:
        if local:
            checkpoint.check_folder(where)
        with quiet():
            config = transformers.AutoConfig.from_pretrained(
                where, trust_remote_code=trust_remote_code, local_files_only=local
            )
    except Exception:
        return KINDS[0]  # loading it reports the reason
    remote = getattr(config, "auto_map", None) or {}
    return next((kind for kind in KINDS if type(config) in kind._model_mapping or kind.__name__ in remote), KINDS[0])


def locate(spec: str) -> tuple[str, bool]:
    """Return the folder of an included model, or else the name itself, and whether it is on this machine."""
    shipped = registry.included_folder(spec)
    where = spec if shipped == Path(spec) else str(shipped)
    return where, included.check_model(where)


def torch_dtype(dtype: str | torch.dtype, usual: torch.dtype) -> torch.dtype:
    """Return the dtype of a name; `usual` for "auto"."""
    return usual if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _own_processor(model: Any, folder: Path) -> Any:
    if model.text_features:
        encoder = folder / text_features.FOLDER
        if not encoder.is_dir():
            return None  # the first prompt explains how to get one
        return text_features.T5Features.from_pretrained(str(encoder), dtype=model.dtype).to(model.device)
    worded = (folder / "processor_config.json").is_file()
    kind = transformers.AutoProcessor if worded else transformers.AutoTokenizer
    return kind.from_pretrained(str(folder), local_files_only=True)


def _load(where: str, kind: Any, device: str, dtype: str | torch.dtype, trust_remote_code: bool, worded: bool = True):
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()

    _configuration(where)  # rejects other forms
    where, local = locate(where)
    if local:
        checkpoint.check_folder(where)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local}
    spread: dict[str, Any] = SPREAD.get(device, {})
    if not spread:
        device = resolve_device(device)
    elif device == "tp" and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError("device: got 'tp' in one process, expected several (torchrun --nproc-per-node 2 ...).")
    else:
        need("accelerate", f"device {device}", "train")
    on_cpu = device == "cpu" or (bool(spread) and not torch.cuda.is_available())
    precision = torch.float32 if on_cpu and dtype == "auto" else dtype
    model = load_exactly(kind, "model", where, dtype=precision, **options, **spread)
    logger.info("%s: loaded %s, %s, to %s", where, type(model).__name__, model.dtype, device)
    processor = transformers.AutoProcessor.from_pretrained(where, **options) if worded else None
    return (model if spread else model.to(device)).eval(), processor


def resolve_device(device: str) -> str:
    """Return the torch device for a name; "auto" is the GPU if there is one. Raises ValueError if it can't be used."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = checkpoint.first_line(error)
        raise ValueError(f"device: got {device!r}, which this torch can't use ({why}).") from None
    return device
