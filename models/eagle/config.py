"""Configuration of the one-layer drafters (`head.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from visspec.io.checkpoint import LARGEST, check_fields, check_positive, check_whole, check_wholes, shorten
from visspec.models.drafting.checkpoint import DrafterConfig
from visspec.models.layers import MOST_LAYERS, OPTIONAL_FACTORS, ROPE_SCALINGS
from visspec.types import MAX_NODES

IMAGES = {  # slots of an image in the draft sequence
    "slots": "as text: the target's feature and the next input embedding (EAGLE)",
    "placeholders": "as text, with the embedding of the placeholder id (EAGLE-3 as SpecForge and speculators train it)",
    "embeddings": "their input embeddings alone, which are layer inputs as they are (MSD, arXiv 2505.14260)",
    "latents": "a few learned latents, and a global vector for later text (ViSpec, arXiv 2509.15235)",
    "queries": "mixtures of the slots, weighted by learned queries of their features (FLASH, arXiv 2505.12728)",
    "gated": "what a compression that is chosen by the question leaves of them (SpecVLM, arXiv 2509.11815)",
    "none": "no elements (HiViS, arXiv 2509.23928)",
    "blind": "no elements, and no features of the target in place of which zeros stand: a control",
}
COMPRESSED = ("latents", "queries", "gated")  # values of `images` with `image_latents`


@dataclass(frozen=True)
class EagleConfig(DrafterConfig):
    """Configuration of the network and of its target.

    fusion: how embedding and feature come together, see `eagle_head`. feature_layers: indices into the target's
    hidden_states (-1: last, after the final norm; target_layers + 1: before it; with fusion "cross" one before the last
    is a target of training alone).
    draft_vocab: ids that the network's own head predicts; 0: the target's head decodes. head_rank: of that head, as the
    product of two matrices (SlimSpec); 0: one matrix. rope_scaling: one of `ROPE_SCALINGS` with its factors by name.
    partial_rotary_factor: share of a head's channels that are rotated, the first ones. mrope_section: rotary channels
    per position row if the drafter's positions are M-RoPE's, else (). positions: "target"; "index", the number of the
    slot in the prompt, as ViSpec and MSD count; "grid", row and column of the predicted code (LANTERN). block: tokens
    of a pass, by FLASH's semi-autoregressive head. norm_input: of the layer with fusion "sum" (SpecVLM).
    norm_output: predicted features are normed, and read again so. qk_layer_norm: queries and
    keys have Chameleon's layer norm, with a scale and a shift for each head.
    """

    target_hidden: int
    target_layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    fusion: str = "sum"
    feature_layers: tuple[int, ...] = (-1,)
    draft_vocab: int = 0
    head_rank: int = 0
    images: str = "slots"
    image_latents: int = 0
    image_ids: tuple[int, ...] = ()
    positions: str = "target"
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    partial_rotary_factor: float = 1.0
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    fc_bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_layer_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_input: bool = False
    own_embedding: bool = False
    block: int = 1
    levels: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_fields(self, "target_hidden", "kv_heads")
        check_whole("head_size", self.head_size, 2, LARGEST)
        check_whole("target_layers", self.target_layers, 1, MOST_LAYERS)
        check_whole("draft_vocab", self.draft_vocab, 0, self.vocab)
        check_whole("head_rank", self.head_rank, 0, self.hidden)
        check_whole("image_latents", self.image_latents, 0)
        check_fields(self, "levels", "block", high=MAX_NODES - 1)
        for name, known in (
            ("fusion", ("sum", "split", "cross")),
            ("images", tuple(IMAGES)),
            ("positions", ("target", "index", "grid")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {shorten(getattr(self, name))}, expected one of {', '.join(known)}")
        self.check_layers(-self.target_layers - 1, self.target_layers + 1)
        for name, high in (("image_ids", LARGEST), ("mrope_section", self.head_size)):
            object.__setattr__(self, name, check_wholes(name, getattr(self, name), 0, high))
        self._check_forms()

    def _check_forms(self) -> None:
        """Raises ValueError for entries that do not go together."""
        if self.head_size % 2:
            raise ValueError(f"head_size: got {self.head_size}, expected an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, expected a divisor of the {self.heads} heads")
        if self.partial_rotary_factor > 1 or self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"partial_rotary_factor: got {self.partial_rotary_factor}, expected an even number of the"
                f" {self.head_size} channels"
            )
        if self.mrope_section and sum(self.mrope_section) != self.rotated // 2:
            expected = f"numbers that sum to {self.rotated // 2}"
            raise ValueError(f"mrope_section: got {shorten(self.mrope_section)}, expected {expected}")
        if self.fusion == "cross" and (len(self.feature_layers) > 2 or self.feature_layers[-1] != -1):
            raise ValueError(
                f"feature_layers: got {list(self.feature_layers)} with fusion 'cross', expected [-1] or [layer, -1]"
            )
        if self.fusion == "cross" and (self.hidden != self.target_hidden or self.block > 1):
            raise ValueError(
                f"fusion: got 'cross' with hidden size {self.hidden} and block {self.block}, expected the target's"
                f" {self.target_hidden} and block 1"
            )
        if self.fusion == "sum" and (self.hidden != self.target_hidden or self.feature_layers != (-1,)):
            raise ValueError(
                f"fusion: got 'sum' with hidden size {self.hidden} and layers {list(self.feature_layers)}, expected the"
                f" target's {self.target_hidden} and its last layer"
            )
        if self.hidden != self.target_hidden and not (self.own_embedding and self.draft_vocab):
            raise ValueError(
                f"hidden: got {self.hidden} and a target of {self.target_hidden}, expected an embedding and a head of"
                " the drafter's own"
            )
        if self.head_rank and not self.draft_vocab:
            raise ValueError(
                f"head_rank: got {self.head_rank} with draft_vocab 0, expected a head of the drafter's own"
            )
        self._check_images()
        self._check_norms()
        self._check_rope()

    def _check_images(self) -> None:
        if (self.images in COMPRESSED) != (self.image_latents > 0):
            raise ValueError(
                f"image_latents: got {self.image_latents} with images {self.images!r}, expected a count above 0 with"
                f" {', '.join(COMPRESSED)} and 0 without"
            )
        if self.images == "embeddings" and self.fusion != "sum":
            raise ValueError(f"images: got 'embeddings' with fusion {self.fusion!r}, expected fusion 'sum'")
        if self.images in COMPRESSED and (self.fusion != "sum" or self.hidden % self.heads):
            raise ValueError(f"images: got {self.images!r}, expected fusion 'sum' and heads that share the hidden size")
        if self.hidden != self.target_hidden and self.images in ("slots", "embeddings", "latents"):
            raise ValueError(
                f"images: got {self.images!r} with hidden size {self.hidden}, expected the target's"
                f" {self.target_hidden}, whose embeddings it reads"
            )

    def _check_norms(self) -> None:
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm")
        for names, *known in (
            (flags, "split"),
            (("norm_input", "qk_layer_norm"), "sum"),
            (("norm_output",), "split", "sum"),
        ):
            if self.fusion not in known and (named := [name for name in names if getattr(self, name)]):
                expected = " or ".join(map(repr, known))
                raise ValueError(f"{named[0]}: got true with fusion {self.fusion!r}, expected fusion {expected}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc, fc_norm: got both, expected one of them")

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
        needed = ROPE_SCALINGS.get(kind) if isinstance(kind, str) else None
        names = set(scaling) - {"rope_type"}
        if needed is None or not needed <= names <= needed | OPTIONAL_FACTORS.get(str(kind), set()):
            kinds = ", ".join(ROPE_SCALINGS)
            raise ValueError(f"rope_scaling: got {shorten(scaling)}, expected the rope_type {kinds} with its factors")
        for name in names:
            check_positive(name, scaling[name])

    @property
    def rotated(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def reduced(self) -> bool:
        """Whether features are not read as they are."""
        return self.fusion != "sum" or self.images == "blind"

    @property
    def key_heads(self) -> int:
        """Keys, and values, that are stored of an element."""
        return 2 * self.kv_heads if self.fusion == "cross" else self.kv_heads

    @property
    def parts(self) -> int:
        """Number of hidden states per token, concatenated, that the target provides."""
        return len(self.feature_layers)
