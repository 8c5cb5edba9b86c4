"""A block drafter to be trained: DFlash (arXiv 2602.06036) as transformers runs it, and DSpark and DFlash 2."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from torch import nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from visspec.io.checkpoint import LARGEST, check_positive, check_whole, check_wholes, shorten
from visspec.models.block.dflash2 import DFlash2Model, with_convolutions
from visspec.models.block.sequential import CandidateSelector, Confidence, Markov, Sequential, Spark
from visspec.models.layers import MOST_LAYERS
from visspec.types import MAX_NODES


@dataclass(frozen=True)
class BlockConfig:
    """Configuration of the network and of its target.

    feature_layers: indices into the target's hidden_states, above 0. block: places of a pass, the pending token's among
    them. mask: the id that stands in the others. markov: rank of the head that adds what the token before a place says
    of it (DSpark, arXiv 2607.05147); 0: none. confidence: a head that expects the acceptance rate of a place from its
    hidden state and the Markov head's vector of the token before it (the same). selector: rank of DFlash 2's selector
    over the likeliest `candidates` tokens of a place; with it convolutions of `taps` places, whose kernels groups of
    `group` channels share; 0: neither.
    """

    family: str
    vocab: int
    hidden: int
    target_layers: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    feature_layers: tuple[int, ...]
    mask: int
    block: int = 16
    markov: int = 0
    confidence: bool = False
    selector: int = 0
    candidates: int = 16
    taps: int = 2
    group: int = 16
    eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self):
        if not isinstance(self.family, str):
            raise ValueError(f"family: got {shorten(self.family)}, expected a name")
        for name in ("vocab", "hidden", "heads", "kv_heads", "intermediate"):
            check_whole(name, getattr(self, name))
        for name, low, high in (
            ("target_layers", 1, MOST_LAYERS),
            ("layers", 1, MOST_LAYERS),
            ("head_size", 2, LARGEST),
            ("mask", 0, self.vocab - 1),
            ("block", 2, MAX_NODES),
            ("markov", 0, self.vocab),
            ("selector", 0, self.vocab),
            ("candidates", 1, self.vocab),
            ("taps", 1, self.block),
            ("group", 1, LARGEST),
        ):
            check_whole(name, getattr(self, name), low, high)
        if not isinstance(self.confidence, bool):
            raise ValueError(f"confidence: got {shorten(self.confidence)}, expected true or false")
        for name in ("eps", "rope_theta"):
            check_positive(name, getattr(self, name))
        layers = check_wholes("feature_layers", self.feature_layers, 1, self.target_layers)
        object.__setattr__(self, "feature_layers", layers)
        if not layers:
            raise ValueError("feature_layers: got (), expected at least one layer")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, expected a divisor of the {self.heads} heads")
        if self.selector and (self.markov or self.confidence):
            raise ValueError(f"selector: got {self.selector} beside DSpark's heads, expected one or the other")

    @property
    def levels(self) -> int:
        return self.block - 1

    def to_dict(self) -> dict:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def assistant(self) -> MuseGlimmerAssistantConfig:
        """transformers' configuration of the network."""
        config = MuseGlimmerAssistantConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            rms_norm_eps=self.eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            sliding_window=1,
            layer_types=["full_attention"] * self.layers,
            block_size=self.block,
            mask_token_id=self.mask,
            target_layer_ids=[i - 1 for i in self.feature_layers],
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        if self.selector:
            with_convolutions(config, self.taps, self.group)
        return config


class BlockHead(nn.Module):
    """Trainable weights of a block drafter."""

    kind: ClassVar[str] = "block_drafter"  # identifies its checkpoints
    config_class: ClassVar[type[BlockConfig]] = BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        self.model = (DFlash2Model if config.selector else MuseGlimmerAssistantModel)(config.assistant())
        if config.markov:
            self.markov = Markov(config.vocab, config.markov)
        if config.confidence:
            self.confidence = Confidence(config.hidden, config.markov)
        if config.selector:
            self.candidate_selector = CandidateSelector(config.vocab, config.hidden, config.selector, config.candidates)

    @property
    def sequential(self) -> Sequential | None:
        """The head that walks through the places of a block, around the same weights."""
        markov, confidence = getattr(self, "markov", None), getattr(self, "confidence", None)
        return Spark(markov, confidence) if markov or confidence else getattr(self, "candidate_selector", None)
