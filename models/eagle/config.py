"""Configuration of the one-layer drafters (`head.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from visspec.io.checkpoint import check_choice, check_whole, shorten
from visspec.models.drafting.checkpoint import DrafterConfig
from visspec.types import MAX_NODES

IMAGES = {  # how the draft sequence represents the image slots
    "slots": "like text: the target's feature and the next input embedding (EAGLE)",
    "placeholders": "like text, with the placeholder id's embedding (EAGLE-3, as SpecForge and speculators train it)",
    "embeddings": "only their input embeddings, used as layer inputs unchanged (MSD, arXiv 2505.14260)",
    "latents": "a few learned latents, plus a global vector for later text (ViSpec, arXiv 2509.15235)",
    "queries": "mixtures of the slots, weighted by learned queries over their features (FLASH, arXiv 2505.12728)",
    "gated": "the output of a compressor that a gate selects from the question (SpecVLM, arXiv 2509.11815)",
    "none": "no elements (HiViS, arXiv 2509.23928)",
    "blind": "no elements, and zeros in place of the target's features (control experiment)",
}
COMPRESSED = ("latents", "queries", "gated")  # values of `images` that use `image_latents`
CHOICES = {"fusion": ("sum", "split", "cross"), "images": tuple(IMAGES), "positions": ("target", "index", "grid")}
OF_FUSIONS = {  # flags, and the values of `fusion` that support them
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm"), ("split",)),
    **dict.fromkeys(("norm_input", "qk_layer_norm"), ("sum",)),
    "norm_output": ("split", "sum"),
    "norm_embedding": ("sum",),
}


@dataclass(frozen=True)
class EagleConfig(DrafterConfig):
    """Configuration of the network and of its target. Fields that only some variants use have defaults."""

    target_hidden: int
    target_layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    fusion: str = "sum"  # how an embedding and a feature are combined, see `head.py`
    # indices into the target's hidden_states (-1: the last, after the final norm; target_layers + 1: before it); with
    # fusion "cross", an entry before the last is only a training target
    feature_layers: tuple[int, ...] = (-1,)
    draft_vocab: int = 0  # number of ids that the network's own LM head predicts; 0: the target's head decodes
    images: str = "slots"  # a key of IMAGES
    image_latents: int = 0
    image_ids: tuple[int, ...] = ()
    # "target"; "index": the slot's number in the prompt, as ViSpec and MSD count; "grid": row and column of the
    # predicted code (LANTERN)
    positions: str = "target"
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # one of `ROPE_SCALINGS` with its factors by name
    partial_rotary_factor: float = 1.0  # share of a head's channels that is rotated, starting with the first
    mrope_section: tuple[int, ...] = ()  # rotary channels per position row, if the drafter uses M-RoPE positions
    mrope_interleaved: bool = False
    fc_bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_layer_norm: bool = False  # Chameleon's layer norm of queries and keys, with a scale and a shift per head
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False  # norm predicted features, and feed them back normed
    norm_input: bool = False  # input norm of the layer with fusion "sum" (SpecVLM)
    norm_embedding: bool = False  # with fusion "sum", norm token embeddings, and image embeddings before a compressor
    ahead: int = 1  # the element built from tokens t and t + 1 belongs to an image if token t + ahead is an image slot
    own_embedding: bool = False
    block: int = 1  # tokens per pass of FLASH's semi-autoregressive head
    levels: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_whole("levels", self.levels, 1, MAX_NODES - 1)
        check_whole("block", self.block, 1, MAX_NODES - 1)
        check_whole("ahead", self.ahead, 0, 1)
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        self.check_layers(-self.target_layers - 1, self.target_layers + 1)
        self._check_ignored()

    def _check_ignored(self) -> None:
        """Raise ValueError for values that the network would otherwise ignore or misread silently."""
        layers, states = self.feature_layers, {"sum": 1, "cross": 2}.get(self.fusion)
        ignored = {
            "images": self.fusion != "sum" and self.images in (*COMPRESSED, "embeddings"),
            "image_latents": (self.images in COMPRESSED) != (self.image_latents > 0),
            "feature_layers": states is not None and (layers[-1] != -1 or len(layers) > states),
            "mrope_section": self.mrope_section and sum(self.mrope_section) != self.rotated // 2,
            **{name: getattr(self, name) and self.fusion not in fusions for name, fusions in OF_FUSIONS.items()},
        }
        for name in (name for name, wrong in ignored.items() if wrong):
            raise ValueError(
                f"{name}: got {shorten(getattr(self, name))}, which does not fit fusion {self.fusion!r}, images"
                f" {self.images!r}, draft_vocab {self.draft_vocab} and {self.rotated} rotary channels."
            )

    @property
    def rotated(self) -> int:
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def foldable(self) -> bool:
        """Return whether `layer.FoldedLayer` can run the network: each matrix follows a norm, each query has a key."""
        normed = self.norm_embedding and self.norm_input and self.norm_output and self.fc_bias
        plain = not (self.qkv_bias or self.qk_norm or self.qk_layer_norm) and self.partial_rotary_factor == 1
        return normed and plain and self.heads == self.kv_heads

    @property
    def parts(self) -> int:
        """Number of hidden states per token that the target provides, concatenated."""
        return len(self.feature_layers)
