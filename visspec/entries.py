"""Data of the `registry`: the built-in drafters, acceptance rules, draft-length policies, orders and image families."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple

from visspec.io.included import load

NEEDS = ("", "text", "codes", "any order", "vectors", "maps")  # what the models of an entry generate
VALUES: dict[
    str, tuple[Any, str]
] = {  # by annotation of a constructor's argument: accepted types, and words for messages
    "int": (int, "a whole number"),
    "float": ((int, float), "a finite number"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}


class Entry(NamedTuple):
    """A named class of the registry."""

    target: Any  # "module:name", imported on use, or the object itself
    what: str
    needs: str = ""  # one of NEEDS; "": any model
    checkpoint: str = ""  # trained drafters: the `kind` or `model_type` in the config.json of their weights

    def load(self) -> Any:
        return load(self.target) if isinstance(self.target, str) else self.target


def options_of(kind: Callable[..., object]) -> dict[str, tuple[str, Any]]:
    """Return annotation and default of the options of a class or function, by name."""
    options = {}
    for name, parameter in signature(kind).parameters.items():
        annotation = parameter.annotation
        if annotation is Parameter.empty:
            annotation = type(parameter.default)
        words = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        if parameter.default is not Parameter.empty and words.split(" | ")[0] in VALUES:
            options[name] = words.removesuffix(" | None"), parameter.default
    return options


TABLES: dict[str, dict[str, Entry]] = {
    "drafter": {
        "none": Entry(None, "plain decoding in our loop"),
        "context": Entry(
            "visspec.models.lookup.context:ContextDrafter", "trees from the context and earlier passes; default",
            checkpoint="context",
        ),
        "ngram": Entry("visspec.models.lookup.context:prompt_lookup", "chains copied from the row's own text"),
        "recycling": Entry("visspec.models.lookup.context:token_recycling", "trees of tokens the target ranked high"),
        "layers": Entry("visspec.models.decoder.layer_skip:LayerSkip", "the target without some of its layers", "text"),
        "mtp": Entry("visspec.models.decoder.mtp:MultiToken", "the checkpoint's own multi-token layers", "text"),
        "eagle": Entry(
            "visspec.models.eagle.drafter:EagleDrafter", "a layer on hidden states (EAGLE and relatives); trained",
            "text", "eagle_head",
        ),
        "block-head": Entry(
            "visspec.models.block.trained:BlockDrafter", "a block in one pass (DFlash, DSpark); trained",
            "text", "block_drafter",
        ),
        "jacobi": Entry("visspec.models.jacobi.drafter:Jacobi", "the target's distributions of the last pass", "codes"),
        "lowres": Entry("visspec.models.lowres.drafter:LowRes", "the enlarged picture of a small model", "codes"),
        "image-eagle": Entry(
            "visspec.models.eagle.image_drafter:ImageFeatureDrafter", "a layer on hidden states; trained",
            "codes", "image_drafter",
        ),
        "distilled": Entry(
            "visspec.models.distilled.drafter:DistilledDrafter", "many codes at once from noise; trained",
            "codes", "distilled_drafter",
        ),
        "ahead": Entry("visspec.models.randar.ahead:Ahead", "the target's forecast of later codes", "any order"),
        "mar": Entry("visspec.models.mar.drafter:SmallMAR", "a smaller MAR; trained", "vectors", "mar_image"),
        "var": Entry("visspec.models.var.drafter:SmallVAR", "a smaller VAR; trained", "maps", "var_image"),
    },
    "rule": {
        "exact": Entry("visspec.accept.exact:Exact", "token-identical to plain decoding; chains and trees"),
        "rejection": Entry("visspec.accept.rejection:Rejection", "exact; for drafts sampled from a known distribution"),
        "block": Entry("visspec.accept.block:Block", "exact; accepts a sampled chain as one block"),
        "typical": Entry("visspec.accept.typical:Typical", "accepts what the target finds plausible; approximate"),
        "lantern": Entry("visspec.accept.lantern:Lantern", "adds up to delta from k neighbours; approximate"),
        "lantern_plus": Entry("visspec.accept.lantern:LanternPlus", "adds up to (lam-1) p of neighbours; approximate"),
        "grouped": Entry("visspec.accept.grouped:Grouped", "accepts a code by its group's mass; approximate"),
        "cool": Entry("visspec.accept.cool:Cool", "ratios relaxed by a factor that decays with depth; approximate"),
        "local": Entry("visspec.accept.local:Local", "verifies a drafted picture code by code; approximate"),
        "coupled": Entry("visspec.accept.coupled:Coupled", "exact; couples denoising chains step by step", "vectors"),
        "surrogate": Entry("visspec.accept.surrogate:Surrogate", "the ratio of CSpD; approximate", "vectors"),
        "scales": Entry("visspec.accept.scales:Scales", "exact; the codes of plain decoding", "maps"),
        "repaired": Entry("visspec.accept.scales:Repaired", "exact; redraws rejected codes", "maps"),
    },
    "length": {
        "adaptive": Entry("visspec.loop.draft_length:AdaptiveLength", "the fastest measured length, or none; default"),
        "fixed": Entry("visspec.loop.draft_length:FixedLength", "the drafter's maximum, or `levels`"),
    },
    "order": {
        "raster": Entry("visspec.loop.orders:Raster", "row by row; default"),
        "islands": Entry("visspec.loop.orders:RejectedRegions", "drafts a whole picture and redraws rejected islands"),
        "spread": Entry("visspec.loop.visits:SpreadOrder", "each place far from the earlier ones", "any order"),
        "halton": Entry("visspec.loop.visits:HaltonOrder", "points of the Halton sequence", "any order"),
        "parallel": Entry("visspec.models.mar.parallel:ParallelMAR", "MAR as published, in a few passes", "vectors"),
    },
    "family": {  # by `model_type`, else by the name of the class
        "janus": Entry("visspec.models.janus.target:Janus", "Janus and Janus-Pro", "codes"),
        "emu3": Entry("visspec.models.emu3.target:Emu3", "Emu3-Gen", "codes"),
        "glm_image": Entry("visspec.models.glm_image.target:GlmImage", "GLM-Image", "codes"),
        "chameleon": Entry("visspec.models.chameleon.target:Chameleon", "Chameleon, Anole, Lumina-mGPT", "codes"),
        "mar_image": Entry("visspec.models.mar.target:MARImages", "a saved MAR", "vectors"),
        "randar_image": Entry("visspec.models.randar.target:PromptedRandARImages", "a saved RandAR", "any order"),
        "var_image": Entry("visspec.models.var.target:VARImages", "a saved VAR", "maps"),
        "llamagen_image": Entry("visspec.models.llamagen.target:LlamaGenImages", "LlamaGen", "codes"),
        "randar_classes": Entry("visspec.models.randar.target:RandARImages", "RandAR", "any order"),
        "infinity_image": Entry("visspec.models.infinity.target:InfinityImages", "Infinity", "maps"),
        "nextstep_image": Entry("visspec.models.nextstep.target:NextStepImages", "NextStep-1", "vectors"),
        "LlamaGen": Entry("visspec.models.llamagen.target:LlamaGenImages", "LlamaGen", "codes"),
        "RandAR": Entry("visspec.models.randar.target:RandARImages", "RandAR", "any order"),
        "MAR": Entry("visspec.models.mar.target:MARImages", "MAR", "vectors"),
        "VAR": Entry("visspec.models.var.target:VARImages", "VAR", "maps"),
        "Infinity": Entry("visspec.models.infinity.target:InfinityImages", "Infinity", "maps"),
        "NextStep": Entry("visspec.models.nextstep.target:NextStepImages", "NextStep-1", "vectors"),
    },
    "layout": {  # published files that `visspec convert` reads
        "llamagen": Entry("visspec.models.llamagen.layout:published", "t2i_*.pt, c2i_*.pt; --vq vq_ds16_*.pt", "codes"),
        "randar": Entry("visspec.models.llamagen.layout:published", "randar_*.safetensors; --vq vq_*.pt", "any order"),
        "mar": Entry("visspec.models.mar.layout:published", "checkpoint-last.pth; --vq kl16.ckpt", "vectors"),
        "nextstep": Entry("visspec.models.nextstep.layout:published", "the authors' folder; --vq its vae", "vectors"),
        "var": Entry("visspec.models.var.layout:published", "var_d*.pth; --vq vae_ch160v4096z32.pth", "maps"),
        "infinity": Entry("visspec.models.infinity.layout:published", "infinity_*.pth; --vq infinity_vae*.pth", "maps"),
    },
}  # fmt: skip
