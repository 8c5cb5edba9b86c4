"""Assembly of an included model whose language model comes from `make real`, as a plain transformers folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from visspec.io.checkpoint import CONFIG, WEIGHTS, read_tensors

SCRIPTS = ("README.md", "provenance.json", "train.py", WEIGHTS)  # files of the parts that are not copied
# the image token replaces a special token that the language model never used in training
IMAGE, UNUSED = '"<image>"', '"<empty_output>"'


def assemble(parts: Path, base: Path, tower: Path, out: Path) -> Path:
    """Write a LLaVA folder `out`, unless it exists and is newer than its parts. Raises ValueError if one is missing.

    Args:
        parts: Projector and LoRA weights, configuration and processor. A matrix `x` of the language model has
            `x.lora_A` (rank, in) and `x.lora_B` (out, rank), scale included; their product is added to its weight.
        base: The language model, a folder of `LlamaForCausalLM` with its tokenizer.
        tower: A LLaVA folder whose vision tower is used.
    """
    if not (base / CONFIG).is_file():
        raise ValueError(
            f"model: {parts.name} is built around {base.name}, which is not in {base.parent}. Run `make real` in a"
            " clone of the repository, which fetches these weights."
        )
    if not (parts / WEIGHTS).is_file():
        raise ValueError(f"model: {parts.name} has no weights yet. Its script makes them: {parts / 'train.py'}.")
    made_of = max(file.stat().st_mtime for file in (base / WEIGHTS, tower / WEIGHTS, *parts.iterdir()))
    if (out / CONFIG).is_file() and (out / WEIGHTS).stat().st_mtime > made_of:
        return out
    tensors = {f"language_model.{name}": t for name, t in read_tensors(base).items()}
    dtype = tensors["language_model.model.norm.weight"].dtype
    tensors |= {name: t for name, t in read_tensors(tower).items() if name.startswith("vision_tower.")}
    own = read_tensors(parts)
    for name in [name for name in own if name.endswith(".lora_A")]:
        stem = name.removesuffix(".lora_A")
        change = own.pop(f"{stem}.lora_B").float() @ own.pop(name).float()
        tensors[f"{stem}.weight"] = tensors[f"{stem}.weight"].float() + change
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in (tensors | own).items()}
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}-", dir=out.parent))
    for file in parts.iterdir():
        if file.is_file() and file.name not in SCRIPTS:
            shutil.copy(file, partial)
    words = (base / "tokenizer.json").read_text(encoding="utf-8").replace(UNUSED, IMAGE)
    (partial / "tokenizer.json").write_text(words, encoding="utf-8")
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return out
