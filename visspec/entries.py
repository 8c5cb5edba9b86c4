"""The built-in drafters, acceptance rules, draft-length policies, orders and image families: data for `registry`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, NamedTuple

NEEDS = ("", "text", "codes", "any order", "vectors", "maps")  # the models that an entry is for, by what they generate
VALUES: dict[str, tuple[Any, str]] = {  # of options, by the annotation of a constructor's argument: types and words
    "int": (int, "a whole number"),
    "float": ((int, float), "a finite number"),
    "bool": (bool, "true or false"),
    "str": (str, "a name"),
}


class Entry(NamedTuple):
    """A class with a name."""

    target: Any  # "module:name", imported on use, or the object itself
    what: str
    needs: str = ""  # one of NEEDS; "": any model
    checkpoint: str = ""  # of a trained drafter: the `kind` or `model_type` in the config.json of its weights

    def load(self) -> Any:
        if not isinstance(self.target, str):
            return self.target
        module, name = self.target.split(":")
        return getattr(import_module(module), name)


def options_of(kind: Callable[..., object]) -> dict[str, tuple[str, Any]]:
    """The options of a class or function, read from its signature: annotation and default by name."""
    found = {}
    for name, parameter in signature(kind).parameters.items():
        annotation = parameter.annotation
        if annotation is Parameter.empty:
            annotation = type(parameter.default)
        words = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        if parameter.default is not Parameter.empty and words.split(" | ")[0] in VALUES:
            found[name] = words.removesuffix(" | None"), parameter.default
    return found


TABLES: dict[str, dict[str, Entry]] = {
    "drafter": {
        "none": Entry(None, "plain decoding in our loop"),
        "context": Entry(
            "visspec.models.lookup.context:ContextDrafter", "a tree of what context and passes propose; default",
            checkpoint="context",
        ),
        "ngram": Entry("visspec.models.lookup.context:prompt_lookup", "chains of what the row's own text repeats"),
        "recycling": Entry("visspec.models.lookup.context:token_recycling", "trees of what the target ranked high"),
        "layers": Entry("visspec.models.decoder.layer_skip:LayerSkip", "the target with layers left out", "text"),
        "mtp": Entry("visspec.models.decoder.mtp:MultiToken", "the checkpoint's own multi-token layers", "text"),
        "eagle": Entry(
            "visspec.models.eagle.drafter:EagleDrafter", "a layer on hidden states (EAGLE and its kin); trained",
            "text", "eagle_head",
        ),
        "block-head": Entry(
            "visspec.models.block.trained:BlockDrafter", "a block in one pass (DFlash, DSpark); trained",
            "text", "block_drafter",
        ),
        "diffusion-lm": Entry(
            "visspec.models.block.diffusion_trained:DiffusionDrafter", "a block of masks, denoised (DEER); trained",
            "text", "diffusion_lm",
        ),
        "jacobi": Entry("visspec.models.jacobi.drafter:Jacobi", "the target's laws of the last pass", "codes"),
        "lowres": Entry("visspec.models.lowres.drafter:LowRes", "a small model's picture, enlarged", "codes"),
        "image-eagle": Entry(
            "visspec.models.eagle.image_drafter:ImageFeatureDrafter", "a layer on hidden states; trained",
            "codes", "image_drafter",
        ),
        "distilled": Entry(
            "visspec.models.distilled.drafter:DistilledDrafter", "from noise to many codes at once; trained",
            "codes", "distilled_drafter",
        ),
        "ahead": Entry("visspec.models.randar.ahead:Ahead", "the target's own laws of later codes", "any order"),
        "mar": Entry("visspec.models.mar.drafter:SmallMAR", "a smaller MAR; trained", "vectors", "mar_image"),
        "var": Entry("visspec.models.var.drafter:SmallVAR", "a smaller VAR; trained", "maps", "var_image"),
    },
    "rule": {
        "exact": Entry("visspec.accept.exact:Exact", "token-identical to plain decoding; chains and trees"),
        "rejection": Entry("visspec.accept.rejection:Rejection", "exact; for drafts sampled from a reported law"),
        "block": Entry("visspec.accept.block:Block", "exact; chains of sampled drafts judged as one"),
        "typical": Entry("visspec.accept.typical:Typical", "keeps what the target finds plausible; approximate"),
        "lantern": Entry("visspec.accept.lantern:Lantern", "codes borrow up to delta from k neighbours; approximate"),
        "lantern_plus": Entry("visspec.accept.lantern:LanternPlus", "the same up to lam times p; approximate"),
        "grouped": Entry("visspec.accept.grouped:Grouped", "codes judged by their group; approximate"),
        "cool": Entry("visspec.accept.cool:Cool", "ratios loosened by a factor that decays with depth; approximate"),
        "local": Entry("visspec.accept.local:Local", "drafted pictures judged place by place; approximate"),
        "coupled": Entry("visspec.accept.coupled:Coupled", "exact; denoising chains coupled step by step", "vectors"),
        "surrogate": Entry("visspec.accept.surrogate:Surrogate", "the ratio of CSpD; approximate", "vectors"),
        "scales": Entry("visspec.accept.scales:Scales", "exact; code for code those of plain decoding", "maps"),
        "repaired": Entry("visspec.accept.scales:Repaired", "exact; rejected codes are drawn again", "maps"),
    },
    "length": {
        "adaptive": Entry("visspec.loop.draft_length:AdaptiveLength", "the fastest by measurement, or none; default"),
        "fixed": Entry("visspec.loop.draft_length:FixedLength", "as many levels as the drafter has, or `levels`"),
    },
    "order": {
        "raster": Entry("visspec.loop.orders:Raster", "row by row; default"),
        "islands": Entry("visspec.loop.orders:RejectedRegions", "a whole drafted picture; rejected islands again"),
        "spread": Entry("visspec.loop.visits:SpreadOrder", "each place far from those before", "any order"),
        "halton": Entry("visspec.loop.visits:HaltonOrder", "points of the Halton sequence", "any order"),
        "parallel": Entry("visspec.models.mar.parallel:ParallelMAR", "MAR as published, in few passes", "vectors"),
    },
    "family": {  # by `model_type`, of converted models too; else by the name of the class
        "janus": Entry("visspec.models.janus.target:Janus", "Janus and Janus-Pro", "codes"),
        "emu3": Entry("visspec.models.emu3.target:Emu3", "Emu3-Gen", "codes"),
        "glm_image": Entry("visspec.models.glm_image.target:GlmImage", "GLM-Image", "codes"),
        "chameleon": Entry("visspec.models.chameleon.target:Chameleon", "Chameleon, Anole, Lumina-mGPT", "codes"),
        "mar_image": Entry("visspec.models.mar.target:MARImages", "a MAR saved with this library", "vectors"),
        "randar_image": Entry("visspec.models.randar.target:PromptedRandARImages", "a RandAR likewise", "any order"),
        "var_image": Entry("visspec.models.var.target:VARImages", "a VAR likewise", "maps"),
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
    "layout": {  # of published files, which `visspec convert` reads
        "llamagen": Entry("visspec.models.llamagen.layout:published", "t2i_*.pt, c2i_*.pt; --vq vq_ds16_*.pt", "codes"),
        "randar": Entry("visspec.models.llamagen.layout:published", "randar_*.safetensors; --vq vq_*.pt", "any order"),
        "mar": Entry("visspec.models.mar.layout:published", "checkpoint-last.pth; --vq kl16.ckpt", "vectors"),
        "nextstep": Entry("visspec.models.nextstep.layout:published", "the authors' folder; --vq its vae", "vectors"),
        "var": Entry("visspec.models.var.layout:published", "var_d*.pth; --vq vae_ch160v4096z32.pth", "maps"),
        "infinity": Entry("visspec.models.infinity.layout:published", "infinity_*.pth; --vq infinity_vae*.pth", "maps"),
    },
}  # fmt: skip
