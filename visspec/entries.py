"""The table of what has a name: acceptance rules, drafters, orders of decoding and draft-length policies.

Data only; `registry` makes them.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A class with a name."""

    reference: str | None  # "module:name"
    what: str
    of: str = ""  # what it is for alone: "text", "images", "vectors", "scales", "any-order images"
    checkpoint: str = ""  # of a trained drafter: the `kind` or `model_type` in the config.json of its weights

    def __str__(self) -> str:
        return f"{self.of}: {self.what}" if self.of else self.what


ACCEPTANCE = {
    "exact": Entry(
        "visspec.accept.exact:Exact", "greedy and sampling, chains and trees; token-identical to plain decoding"
    ),
    "rejection": Entry(
        "visspec.accept.rejection:Rejection",
        "exact, with uniform numbers of its own: for drafts sampled from a reported law",
    ),
    "block": Entry(
        "visspec.accept.block:Block", "exact, chains of sampled drafts judged as one: no fewer tokens than rejection"
    ),
    "typical": Entry("visspec.accept.typical:Typical", "keeps what the target finds plausible; drift is measured"),
    "lantern": Entry("visspec.accept.lantern:Lantern", "image codes borrow up to delta from k codebook neighbours"),
    "lantern_plus": Entry("visspec.accept.lantern:LanternPlus", "the same, up to lam times a code's own probability"),
    "grouped": Entry("visspec.accept.grouped:Grouped", "image codes judged by their group: ranks of p, or clusters"),
    "cool": Entry("visspec.accept.cool:Cool", "ratios loosened by a factor that decays with depth"),
    "coupled": Entry(
        "visspec.accept.coupled:Coupled",
        "denoising chains coupled step by step with the drafter's; exact; several steps in a pass",
        "vectors",
    ),
    "surrogate": Entry(
        "visspec.accept.surrogate:Surrogate", "the published ratio (CSpD); drift is measured", "vectors"
    ),
    "scales": Entry(
        "visspec.accept.scales:Scales", "scales of codes; exact, code for code as plain decoding draws them"
    ),
    "repaired": Entry(
        "visspec.accept.scales:Repaired",
        "scales of codes, rejected codes drawn again; exact, with uniform numbers of its own",
    ),
    "local": Entry(
        "visspec.accept.local:Local", "drafted images judged place by place; rejected islands are drawn again"
    ),
}
DRAFTERS = {
    "none": Entry(None, "plain decoding in our loop"),
    "ngram": Entry("visspec.models.lookup.ngram:NGram", "prompt and history lookup; every target, nothing to train"),
    "context": Entry(
        "visspec.models.lookup.context:ContextDrafter",
        "one tree of what the context and earlier passes propose; nothing to train",
    ),
    "suffix": Entry(
        "visspec.models.lookup.suffix:SuffixDrafter",
        "what followed the longest ending seen before; shared=true: in all requests",
    ),
    "recycling": Entry(
        "visspec.models.lookup.recycling:Recycling",
        "trees of what the target ranked highest after each token in earlier passes; shared=true: of all requests",
    ),
    "layers": Entry(
        "visspec.models.decoder.layer_skip:LayerSkip",
        "the target itself with layers left out, chosen on the fly (every=3), or an early exit (exit=4)",
        "text",
    ),
    "mtp": Entry(
        "visspec.models.decoder.mtp:MultiToken",
        "layers of the target's own checkpoint that predict several tokens (`use_mtp` in transformers, or `mtp.*`)",
        "text",
    ),
    "jacobi": Entry(
        "visspec.models.jacobi.drafter:Jacobi", "the target's own laws of the last pass; no training", "images"
    ),
    "lowres": Entry(
        "visspec.models.lowres.drafter:LowRes", "a low-resolution sibling draws all of it, enlarged", "images"
    ),
    "eagle": Entry(
        "visspec.models.eagle.drafter:FeatureDrafter",
        "on the target's hidden states (EAGLE, ViSpec); trained",
        "text",
        "feature_drafter",
    ),
    "eagle-head": Entry(
        "visspec.models.eagle.head_drafter:EagleDrafter",
        "the same in the published forms (EAGLE-1 to 3, MSD, ViSpec, FLASH, DREAM, ...); trained, or one of others",
        "text",
        "eagle_head",
    ),
    "block-head": Entry(
        "visspec.models.block.trained:BlockDrafter",
        "several places in one pass, with the target's hidden states as context (DFlash, DSpark); trained",
        "text",
        "block_drafter",
    ),
    "diffusion-lm": Entry(
        "visspec.models.block.diffusion_trained:DiffusionDrafter",
        "a block of masks denoised in one pass or a few, by a masked diffusion language model (DEER); trained",
        "text",
        "diffusion_lm",
    ),
    "image-eagle": Entry(
        "visspec.models.eagle.image_drafter:ImageFeatureDrafter",
        "on the target's hidden states; trained; tree=chain, dynamic or static",
        "images",
        "image_drafter",
    ),
    "distilled": Entry(
        "visspec.models.distilled.drafter:DistilledDrafter",
        "from the noise of many places to their codes, in a few passes of a small network; trained",
        "images",
        "distilled_drafter",
    ),
    "mar": Entry(
        "visspec.models.mar.drafter:SmallMAR", "a smaller MAR, in the order of the row; trained", "vectors", "mar_image"
    ),
    "var": Entry(
        "visspec.models.var.drafter:SmallVAR",
        "a smaller next-scale model, several scales ahead; trained",
        "scales",
        "var_image",
    ),
    "ahead": Entry(
        "visspec.models.randar.ahead:Ahead",
        "the target's own laws of later codes, at no further pass (ASSD); no training",
        "any-order images",
    ),
}
ORDERS = {  # of generation of an image's positions
    "raster": Entry("visspec.loop.orders:Raster", "row by row, through the loop; the default"),
    "islands": Entry(
        "visspec.loop.orders:RejectedRegions",
        "a drafted image is judged at once, what is rejected is drawn again; of lowres with local by itself",
    ),
    "spread": Entry(
        "visspec.loop.visits:SpreadOrder", "every place as far as can be from those before", "any-order images"
    ),
    "halton": Entry("visspec.loop.visits:HaltonOrder", "points of the Halton sequence", "any-order images"),
    "parallel": Entry(
        "visspec.models.mar.parallel:ParallelMAR",
        "published MAR: several tokens in each of `iterations` passes",
        "vectors",
    ),
}
LENGTHS = {  # of drafts; drafters with `entropy` and `confidence` end single rows earlier
    "adaptive": Entry(
        "visspec.loop.draft_length:AdaptiveLength", "the fastest by measured costs and acceptance, or none; the default"
    ),
    "fixed": Entry("visspec.loop.draft_length:FixedLength", "as many levels as the drafter has, or `levels`"),
}
TABLES = {"drafter": DRAFTERS, "acceptance": ACCEPTANCE, "order": ORDERS, "length": LENGTHS}
KINDS = {entry.checkpoint: name for name, entry in DRAFTERS.items() if entry.checkpoint}  # who reads a checkpoint
