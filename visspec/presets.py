"""Published methods as data: decoding presets, and recipes for `visspec train drafter`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from visspec.io.checkpoint import read_json
from visspec.io.files import write_json
from visspec.types import ConfiguredModel

SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


class Preset(NamedTuple):
    """A published method as arguments of `accelerate` or `ImagePipeline`; a trained drafter is given by its kind."""

    drafter: str
    acceptance: str
    source: str
    order: str | None = None
    parts: dict[str, Any] = {}  # noqa: RUF012, parts of the pipeline that change the target
    levels: int | None = None

    @property
    def method(self) -> dict[str, str | None]:
        """Arguments of a call of an `ImagePipeline`."""
        return {"drafter": self.drafter, "acceptance": self.acceptance, "order": self.order}

    def __str__(self) -> str:
        return "/".join(filter(None, (self.drafter, self.acceptance, self.order)))


PRESETS: dict[str, dict[str, Preset]] = {  # by name, then by what the model generates; compared in docs/methods.md
    "plain": {
        "text": Preset("none", "exact", "no drafting, in our loop"),
        "codes": Preset("none", "exact", "no drafting, in our loop"),
        "vectors": Preset("none", "coupled:window=1", "no drafting, in our loop"),
        "maps": Preset("none", "scales", "no drafting, in our loop"),
    },
    "lookup": {"text": Preset("ngram", "exact", "prompt lookup decoding")},
    "suffix": {"text": Preset("context:sources=matches+answers", "exact", "SuffixDecoding (arXiv 2411.04975)")},
    "recycling": {"text": Preset("recycling", "exact", "Token Recycling (arXiv 2408.08696)")},
    "swift": {"text": Preset("layers", "exact", "SWIFT (arXiv 2410.06916): the model without some of its layers")},
    "typical": {"text": Preset("auto", "typical", "typical acceptance (Medusa, arXiv 2401.10774)")},
    "gumbel": {"codes": Preset("jacobi:window=12", "exact", "Jacobi windows coupled to the target's own noise")},
    "coupled": {
        "codes": Preset("jacobi:redraw=maximal,window=16", "rejection", "SCD: Jacobi windows with maximal coupling"),
        "vectors": Preset("mar", "coupled:window=16", "drafted vectors, coupled step by step"),
    },
    "sjd": {"codes": Preset("jacobi:redraw=independent,start=random,window=16", "rejection", "SJD (ICLR 2025)")},
    "gsd": {
        "codes": Preset("jacobi:redraw=independent,start=random,window=16", "grouped:group=14", "GSD (ICCV 2025)")
    },
    "drafter": {"codes": Preset("image-eagle:levels=8", "exact", "the trained drafter's chains")},
    "block": {"codes": Preset("image-eagle:levels=8", "block", "block verification (ICLR 2025) of the same chains")},
    "front": {"codes": Preset("image-eagle:window=24", "rejection", "Jacobi windows that the trained drafter begins")},
    "distilled": {"codes": Preset("distilled", "exact", "Distilled Decoding (arXiv 2412.17153) as a drafter")},
    "naive": {"codes": Preset("image-eagle:tree=dynamic", "rejection", "EAGLE-2 trees, exact rejection")},
    "lantern": {"codes": Preset("image-eagle:tree=dynamic", "lantern:k=100,delta=0.1", "LANTERN (ICLR 2025)")},
    "lantern++": {"codes": Preset("image-eagle:tree=static", "lantern_plus:k=10,lam=2.0", "LANTERN++ (ICLR-W 2025)")},
    "cool": {"codes": Preset("image-eagle", "cool:omega=1.1,nu=0.7", "COOL-SD (AAAI 2026)")},
    "mulo": {
        "codes": Preset("lowres:upsample=upsampler", "local:tau=0.05,k=8,radius=1,window=2", "MuLo-SD (CVPR 2026)")
    },
    "coupled-lantern": {
        "codes": Preset("jacobi:redraw=maximal,window=16", "lantern:k=20,delta=0.05", "LANTERN on Jacobi windows")
    },
    "denoise": {"vectors": Preset("none", "coupled:window=32", "speculative sampling of diffusion chains")},
    "surrogate": {"vectors": Preset("mar", "surrogate", "CSpD (arXiv 2411.11925), as published")},
    "scales": {"maps": Preset("var", "scales", "drafted scales, same codes as plain decoding")},
    "repaired": {"maps": Preset("var", "repaired", "drafted scales, maximal coupling of each code")},
    "code": {
        "maps": Preset(
            "none", "scales", "CoDe (arXiv 2411.17787): the small model draws the last scales",
            parts={"refiner": "var", "handover": 5},
        )
    },
    "scalekv": {
        "maps": Preset("none", "scales", "ScaleKV (arXiv 2505.19602): a tenth of the cache", parts={"budget": 0.1})
    },
    "assd": {"any order": Preset("ahead:levels=4", "exact", "ASSD (ICLR 2026), distant codes first", "spread")},
    "assd-raster": {"any order": Preset("ahead:levels=4", "exact", "ASSD row by row", "raster")},
}  # fmt: skip


class Recipe(NamedTuple):
    """A published drafter as data: its network (`EagleConfig` or that of its `kind`), its training
    (`train.options.TrainingOptions`), and the trees it drafts. `sees` describes what it receives of a picture.
    """

    source: str
    sees: str
    network: dict[str, Any]
    plan: dict[str, Any]
    draft: dict[str, Any]  # width and nodes, or options of `StructuredDrafter.shaped`
    text_first: bool = False  # train on text first, then on more and more pictures
    kind: str = "eagle"  # of `DRAFTERS`


SUM = {"fusion": "sum", "positions": "index"}
FEATURES = {
    "unroll": 1,
    "opening": 1.0,
    "feature_weight": 10.0,
}  # smooth L1 of features, plus a tenth of the cross-entropy
BLOCKS = {"unroll": 1, "opening": 1.0}  # cross-entropy
TREES = {"width": 10, "nodes": 60}
RECIPES = {  # for `visspec train drafter --preset`; docs/train.md explains what each sees of a picture
    "eagle": Recipe(
        "EAGLE (arXiv 2401.15077)", "all slots", {**SUM, "images": "slots", "levels": 5}, FEATURES, {"tree": "eagle"}
    ),
    "eagle2": Recipe(
        "EAGLE-2 (arXiv 2406.16858)", "all slots", {**SUM, "images": "slots", "levels": 6}, FEATURES, TREES
    ),
    "eagle3": Recipe(
        "EAGLE-3 (arXiv 2503.01840)", "features at all slots",
        {"fusion": "split", "images": "placeholders", "fc_bias": False, "draft_vocab": 32000, "levels": 8},
        {"unroll": 7, "opening": 1.0, "decay": 0.8}, TREES,
    ),
    "vispec": Recipe(
        "ViSpec (arXiv 2509.15235)", "one latent, a global vector",
        {**SUM, "images": "latents", "image_latents": 1, "levels": 4},
        {"unroll": 2, "opening": 0.5},
        {"width": 8, "nodes": 30},
    ),
    "msd": Recipe(
        "MSD (arXiv 2505.14260)", "embeddings at all slots",
        {**SUM, "images": "embeddings", "levels": 6}, FEATURES, TREES, text_first=True,
    ),
    "hivis": Recipe(
        "HiViS (arXiv 2509.23928): no image tokens", "nothing", {**SUM, "images": "none", "levels": 6}, FEATURES, TREES
    ),
    "flash": Recipe(
        "FLASH (arXiv 2505.12728), chains of two passes", "64 latents",
        {**SUM, "images": "queries", "image_latents": 64, "block": 5, "levels": 10},
        {**FEATURES, "decay": 1.0},
        {},
    ),
    "specvlm": Recipe(
        "SpecVLM (arXiv 2509.11815)", "32 latents, by the question",
        {**SUM, "images": "gated", "image_latents": 32, "norm_input": True, "levels": 8}, FEATURES, TREES,
    ),
    "dream": Recipe(
        "DREAM (arXiv 2505.19201)", "all slots",
        {"fusion": "cross", "positions": "index", "images": "slots", "levels": 6},
        {"unroll": 1, "loss": "kl", "opening": 0.0, "feature_weight": 0.4},  # 0.2 of each of two layers
        {"width": 4, "nodes": 32},
    ),
    "dflash": Recipe(
        "DFlash (arXiv 2602.06036), one pass a block", "states at all slots", {"layers": 5, "block": 16}, BLOCKS, {},
        kind="block-head",
    ),
    "ddtree": Recipe(
        "DDTree (arXiv 2604.12989): DFlash, and trees over its block", "states at all slots",
        {"layers": 5, "block": 16}, BLOCKS, {"width": 8, "nodes": 60}, kind="block-head",
    ),
    "dspark": Recipe(
        "DSpark (arXiv 2607.05147): DFlash with a low-rank Markov head and one that expects acceptance",
        "states at all slots",
        {"layers": 5, "block": 16, "markov": 64, "confidence": True}, {**BLOCKS, "confidence_weight": 1.0}, {},
        kind="block-head",
    ),
    "dflash2": Recipe(
        "DFlash 2 (vLLM's pull request 52816): DFlash with short convolutions and a selector", "states at all slots",
        {"layers": 5, "block": 16, "selector": 64}, {**BLOCKS, "selector_weight": 1.0}, {}, kind="block-head",
    ),
    "blind": Recipe(
        "a control: neither image tokens nor features of the target", "nothing",
        {**SUM, "images": "blind", "levels": 6}, {"unroll": 5, "opening": 0.5}, TREES,
    ),
    "own": Recipe("ViSpec's form with norms; the default", "one latent", {"image_latents": 1}, {}, {}),
    "image-eagle": Recipe(
        "EAGLE for image codes (LANTERN, arXiv 2410.03355): one layer, guided distributions from one stream",
        "features of all codes", {"levels": 5}, {"unroll": 5}, {}, kind="image-eagle",
    ),
    "distilled": Recipe(
        "Distilled Decoding (arXiv 2412.17153) as a drafter: the noise of many places to their codes", "all codes",
        {"layers": 3}, {"unroll": 1}, {}, kind="distilled",
    ),
}  # fmt: skip


def target_sizes(model: ConfiguredModel) -> dict[str, Any]:
    """Return the model sizes that identify the target of a tuned preset."""
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    return {name: getattr(model.config if name == "model_type" else text, name, None) for name in SIZES}


def write_preset(path: str | Path, model: ConfiguredModel, choice: Mapping[str, Any], **more: object) -> None:
    """Write a preset for one model, as `visspec tune --out` does."""
    settings = {name: choice[name] for name in ("drafter", "acceptance", "levels", "order") if name in choice}
    write_json(path, {**settings, "made_for": target_sizes(model), **more})


def read_preset(path: str | Path, model: ConfiguredModel | None = None) -> Preset:
    """Read a preset from a file. Raises ValueError for other files, or if it was made for another model."""
    entries = read_json(Path(path).parent, Path(path).name)
    if missing := [name for name in ("drafter", "acceptance", "made_for") if name not in entries]:
        raise ValueError(f"preset: {path} has no {missing[0]}, expected a file that `visspec tune --out` wrote.")
    for name, value in (target_sizes(model) if model is not None else {}).items():
        if entries["made_for"].get(name) != value:
            made_for = entries["made_for"].get(name)
            raise ValueError(f"preset: {path} is made for a model with {name} {made_for!r}, got {value!r}.")
    levels = entries.get("levels") or None
    return Preset(entries["drafter"], entries["acceptance"], str(path), entries.get("order"), levels=levels)
