"""Published methods as values: of image generation, and drafters that `visspec train drafter` trains."""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """Settings of a published method of image generation. What has to be trained is named by its kind: a drafter of
    `entries.DRAFTERS`, or an "upsampler"; `registry.preset` fills in the included one that is made for the model.
    """

    drafter: str
    acceptance: str
    source: str
    order: str | None = None
    parts: dict[str, Any] = {}  # noqa: RUF012, of the pipeline: another target

    def __str__(self) -> str:
        return "/".join(filter(None, (self.drafter, self.acceptance, self.order)))


CODES = {  # docs/presets.md compares them
    "plain": Preset("none", "exact", "no drafting, in our loop"),
    "gumbel": Preset("jacobi:window=12", "exact", "Jacobi windows coupled to the target's own noise; token-identical"),
    "coupled": Preset("jacobi:redraw=maximal,window=16", "rejection", "SCD: Jacobi windows, maximal coupling"),
    "sjd": Preset("jacobi:redraw=independent,start=random,window=16", "rejection", "SJD (ICLR 2025)"),
    "gsd": Preset("jacobi:redraw=independent,start=random,window=16", "grouped:group=14", "GSD (ICCV 2025)"),
    "drafter": Preset("image-eagle:levels=8", "exact", "the trained drafter, chains coupled to the target's own noise"),
    "block": Preset("image-eagle:levels=8", "block", "block verification (ICLR 2025) of the trained drafter's chains"),
    "front": Preset(
        "image-eagle:window=24", "rejection", "Jacobi windows, their first places drafted with the trained drafter"
    ),
    "distilled": Preset("distilled", "exact", "Distilled Decoding (arXiv 2412.17153) as a drafter; token-identical"),
    "naive": Preset("image-eagle:tree=dynamic", "rejection", "EAGLE-2 trees, exact rejection"),
    "lantern": Preset("image-eagle:tree=dynamic", "lantern:k=100,delta=0.1", "LANTERN (ICLR 2025)"),
    "lantern++": Preset("image-eagle:tree=static", "lantern_plus:k=10,lam=2.0", "LANTERN++ (ICLR-W 2025)"),
    "cool": Preset("image-eagle", "cool:omega=1.1,nu=0.7", "COOL-SD (AAAI 2026)"),
    "mulo": Preset("lowres:upsample=upsampler", "local:tau=0.05,k=8,radius=1,window=2", "MuLo-SD (CVPR 2026)"),
    "coupled-lantern": Preset(
        "jacobi:redraw=maximal,window=16",
        "lantern:k=20,delta=0.05",
        "LANTERN on Jacobi windows",
    ),
}
VECTORS = {  # of models of vectors
    "plain": Preset("none", "coupled:window=1", "no drafting, one step of a chain in a pass of the head"),
    "denoise": Preset("none", "coupled:window=32", "accelerated diffusion by speculative sampling, on every vector"),
    "coupled": Preset("mar", "coupled:window=16", "drafted vectors, chains coupled step by step"),
    "surrogate": Preset("mar", "surrogate", "CSpD (arXiv 2411.11925), as its paper says"),
}
MAPS = {  # of next-scale models; drafter and refiner are a smaller one
    "plain": Preset("none", "scales", "no drafting, a scale in a pass"),
    "scales": Preset("var", "scales", "drafted scales, code for code those of plain decoding"),
    "repaired": Preset("var", "repaired", "drafted scales, maximal coupling of each code"),
    "code": Preset(
        "none",
        "scales",
        "CoDe (arXiv 2411.17787): the small model draws the last scales",
        parts={"refiner": "var", "handover": 5},
    ),
    "scalekv": Preset("none", "scales", "ScaleKV (arXiv 2505.19602): a tenth of the cache", parts={"budget": 0.1}),
}
ANY_ORDER = {  # of models that draw in any order, beside those of `CODES` that they take
    "assd": Preset(
        "ahead:levels=4", "exact", "ASSD (ICLR 2026), one pass a round; codes far from each other first", "spread"
    ),
    "assd-raster": Preset("ahead:levels=4", "exact", "the same row by row", "raster"),
}
IMAGES = {"codes": CODES, "any order": CODES | ANY_ORDER, "vectors": VECTORS, "maps": MAPS}  # by what a family draws


class TrainedPreset(NamedTuple):
    """A published drafter as values of one: of its network (`EagleConfig`, or that of its `kind`), of its training
    (`train.options.TrainingOptions`), and of the trees it drafts. sees: what it is told of a picture.
    """

    source: str
    sees: str
    network: dict[str, Any]
    plan: dict[str, Any]
    draft: dict[str, Any]  # width and nodes, or a shape of `StructuredDrafter.shaped`
    text_first: bool = False  # begin with text alone, then more and more pictures
    kind: str = "eagle-head"  # of `DRAFTERS`


SUM = {"fusion": "sum", "positions": "index"}
FEATURES = {"unroll": 1, "opening": 1.0, "feature_weight": 10.0}  # smooth L1 of features, and a tenth of cross-entropy
BLOCKS = {"unroll": 1, "opening": 1.0}  # cross-entropy
TREES = {"width": 10, "nodes": 60}
TRAINED = {  # `visspec train drafter --preset`; docs/drafters.md says what each sees of the picture
    "eagle": TrainedPreset(
        "EAGLE (arXiv 2401.15077)", "all slots", {**SUM, "images": "slots", "levels": 5}, FEATURES, {"tree": "eagle"}
    ),
    "eagle2": TrainedPreset(
        "EAGLE-2 (arXiv 2406.16858)", "all slots", {**SUM, "images": "slots", "levels": 6}, FEATURES, TREES
    ),
    "eagle3": TrainedPreset(
        "EAGLE-3 (arXiv 2503.01840)", "features at all slots",
        {"fusion": "split", "images": "placeholders", "fc_bias": False, "draft_vocab": 32000, "levels": 8},
        {"unroll": 7, "opening": 1.0, "decay": 0.8}, TREES,
    ),
    "vispec": TrainedPreset(
        "ViSpec (arXiv 2509.15235)", "one latent, a global vector",
        {**SUM, "images": "latents", "image_latents": 1, "levels": 4},
        {"unroll": 2, "opening": 0.5},
        {"width": 8, "nodes": 30},
    ),
    "msd": TrainedPreset(
        "MSD (arXiv 2505.14260)", "embeddings at all slots",
        {**SUM, "images": "embeddings", "levels": 6}, FEATURES, TREES, text_first=True,
    ),
    "hivis": TrainedPreset(
        "HiViS (arXiv 2509.23928): no image tokens", "nothing", {**SUM, "images": "none", "levels": 6}, FEATURES, TREES
    ),
    "flash": TrainedPreset(
        "FLASH (arXiv 2505.12728), chains of two passes", "64 latents",
        {**SUM, "images": "queries", "image_latents": 64, "block": 5, "levels": 10},
        {**FEATURES, "decay": 1.0},
        {},
    ),
    "specvlm": TrainedPreset(
        "SpecVLM (arXiv 2509.11815)", "32 latents, by the question",
        {**SUM, "images": "gated", "image_latents": 32, "norm_input": True, "levels": 8}, FEATURES, TREES,
    ),
    "dream": TrainedPreset(
        "DREAM (arXiv 2505.19201)", "all slots",
        {"fusion": "cross", "positions": "index", "images": "slots", "levels": 6},
        {"unroll": 1, "loss": "kl", "opening": 0.0, "feature_weight": 0.4},  # 0.2 of each of two layers
        {"width": 4, "nodes": 32},
    ),
    "dflash": TrainedPreset(
        "DFlash (arXiv 2602.06036), one pass a block", "states at all slots", {"layers": 5, "block": 16}, BLOCKS, {},
        kind="block-head",
    ),
    "ddtree": TrainedPreset(
        "DDTree (arXiv 2604.12989): DFlash, and trees over its block", "states at all slots",
        {"layers": 5, "block": 16}, BLOCKS, {"width": 8, "nodes": 60}, kind="block-head",
    ),
    "dspark": TrainedPreset(
        "DSpark (arXiv 2607.05147): DFlash with a low-rank Markov head and one that expects acceptance",
        "states at all slots",
        {"layers": 5, "block": 16, "markov": 64, "confidence": True}, {**BLOCKS, "confidence_weight": 1.0}, {},
        kind="block-head",
    ),
    "dflash2": TrainedPreset(
        "DFlash 2 (vLLM's pull request 52816): DFlash with short convolutions and a selector", "states at all slots",
        {"layers": 5, "block": 16, "selector": 64}, {**BLOCKS, "selector_weight": 1.0}, {}, kind="block-head",
    ),
    "deer": TrainedPreset(
        "DEER (arXiv 2512.15176): a masked diffusion language model, one pass a block", "nothing",
        {"layers": 4, "block": 15}, {"unroll": 4, "opening": 1.0, "decay": 1.0}, {},
        kind="diffusion-lm",
    ),
    "blind": TrainedPreset(
        "a control: neither image tokens nor features of the target", "nothing",
        {**SUM, "images": "blind", "levels": 6}, {"unroll": 5, "opening": 0.5}, TREES,
    ),
}  # fmt: skip
OWN = TrainedPreset(  # without a preset
    "ViSpec's form with norms", "one latent", {"image_latents": 1}, {}, {}, kind="eagle"
)
TRAINED_IMAGES = {  # the same for image models that draw code after code; the first is the default
    "image-eagle": TrainedPreset(
        "EAGLE for image codes (LANTERN, arXiv 2410.03355): one layer, guided distributions from one stream",
        "features of all codes", {"levels": 5}, {"unroll": 5}, {}, kind="image-eagle",
    ),
    "distilled": TrainedPreset(
        "Distilled Decoding (arXiv 2412.17153) as a drafter: the noise of many places to their codes", "all codes",
        {"layers": 3}, {"unroll": 1}, {}, kind="distilled",
    ),
}  # fmt: skip
