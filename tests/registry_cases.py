"""A tiny drafter of every row of the registry, and setups of the tiny Janus that draw with them."""

import torch

from tests import tiny_images
from tests.image_cases import made
from tests.tiny import model_of
from visspec import registry
from visspec.distributions import Categorical
from visspec.io import included
from visspec.loop.draft_length import FixedLength
from visspec.loop.setup import build_setup
from visspec.models.block.trained import BlockDrafter
from visspec.models.decoder.layer_skip import LayerSkip
from visspec.models.distilled.drafter import DistilledDrafter
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.image_drafter import ImageFeatureDrafter
from visspec.models.image_codes.target import ImageAR
from visspec.models.janus.target import Janus
from visspec.models.lookup.context import ContextDrafter, prompt_lookup, token_recycling
from visspec.models.lowres.drafter import LowRes
from visspec.types import Request, Sampling

ROWS = [0, 1, 2]
OWN_TESTS = ("vectors", "maps", "any order")  # their drafters, with their rules
ELSEWHERE = {name for name, entry in registry.table("drafter").items() if entry.needs in OWN_TESTS} | {
    "mtp"
}  # a checkpoint's heads
TEXT_ALONE = {name for name, entry in registry.table("drafter").items() if entry.needs == "text"} - ELSEWHERE
TEXT = TEXT_ALONE | {name for name, entry in registry.table("drafter").items() if not entry.needs} | {"jacobi"}
DRAFTERS = {  # of the tiny image model, from options
    "none": lambda **options: None,
    "ngram": lambda **options: prompt_lookup(**options),
    "context": lambda **options: ContextDrafter(**options),
    "recycling": lambda **options: token_recycling(**options),
    "layers": lambda **options: LayerSkip(**options),
    "jacobi": lambda **options: registry.drafter_class("jacobi")(**{**options, "window": 5}),
    "lowres": lambda **options: LowRes(Janus(tiny_images.sibling(), None), upsample="latent"),
    "eagle": lambda **options: EagleDrafter.for_model(model_of("llava"), image_latents=1),
    "block-head": lambda **options: BlockDrafter.for_model(model_of("llava"), layers=1, block=4, markov=3),
    "image-eagle": lambda **options: ImageFeatureDrafter(
        ImageFeatureDrafter.for_model(made("janus").family, levels=4).head, made("janus").family, **options
    ),
    "distilled": lambda **options: DistilledDrafter(
        DistilledDrafter.for_model(made("janus").family, layers=1).head, made("janus").family, **options
    ),
}
TOKENS_ALONE = {"context", "distilled"}  # trained, and read nothing of the target's passes
ANY_ORDER = {name for name, entry in registry.table("order").items() if entry.needs == "any order"}
CODE_RULES = [name for name, entry in registry.table("rule").items() if entry.load().traits.distribution is Categorical]
RULES = {  # options that a codebook of 24 codes, and short chains, have room for
    "lantern": "lantern:k=5,delta=0.3", "lantern_plus": "lantern_plus:k=5,lam=2", "local": "local:tau=0.02,k=3",
}  # fmt: skip
SMALL = {"k=100": "k=5", "k=20": "k=5", "k=10": "k=5", "k=8": "k=3"}  # a preset's neighbours, as far as codes reach


def tiny_drafter(spec):
    """The drafter of a registered name, tiny; a shipped one is a fresh network of its kind."""
    name, options = registry.parse(spec or "none")
    return DRAFTERS[included.table().drafters[name].kind if name in included.table().drafters else name](**options)


def janus_pair(drafter, rule, order=None):
    family = made("janus").family

    def make_target(traits):
        return ImageAR(family, features=bool(traits.feature_layers))

    return build_setup(drafter, "", rule, family, make_target, order=order, length=FixedLength)


def drawn(setup, rows, seed=0, temperature=1.0, guidance=3.0, grid=None, faults=0):
    case, (ids, attention) = made("janus"), tiny_images.prompts()
    given = case.family.from_ids(ids[rows], attention[rows], guidance != 1)
    sampling = Sampling(temperature, guidance=guidance)
    request = Request(given, given.ids, case.layout.positions, sampling, grid=grid or case.layout.grid)
    request.generators = [torch.Generator().manual_seed(seed + r) for r in rows] if temperature else None
    state = setup.decode(request)
    assert faults is None or state.trace.faults == faults
    return state.tokens, state
