"""Base class of our own image models: folders in transformers' layout, read strictly."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from visspec.io.checkpoint import (
    check_folder,
    check_shapes,
    first_line,
    load_strictly,
    read_json,
    read_shapes,
    read_tensors,
)


class PartsConfig(PreTrainedConfig):
    """network, codec: settings of the network and of the codec that decodes its codes to images."""

    def __init__(self, network: dict[str, Any] | None = None, codec: dict[str, Any] | None = None, **options: Any):
        self.network, self.codec = network or {}, codec or {}
        super().__init__(**options)


class OwnImageModel(PreTrainedModel):
    """Base class of image networks that transformers does not have."""

    generation_config: Any = None  # the folder's defaults for guidance and temperature
    class_conditional = False  # whether prompts are class names, which need no processor
    text_features = 0  # feature size of the text encoder that the model needs; 0: it needs none

    @property
    def image_codec(self) -> Any:
        """The codec that decodes codes or vectors to images; None if the folder has none."""
        return getattr(self, "codec", getattr(self, "autoencoder", None))

    @classmethod
    def of(cls, entries: dict[str, Any], settings: dict[str, Any], **parts: nn.Module) -> Self:
        """Build a model from loaded parts, by attribute name.

        Args:
            entries: Fields of its configuration.
            settings: Fields of `generation_config`.
        """
        configuration = cls.config_class
        assert configuration is not None
        with torch.device("meta"):
            model: Any = cls(configuration(**entries))
        for name, part in parts.items():
            setattr(model, name, part)
        model.generation_config = GenerationConfig(do_sample=True, **settings)
        return model.eval()

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **options: Any) -> None:
        """Save as transformers does, and save `generation_config`, which it skips for models without `generate`."""
        super().save_pretrained(save_directory, *args, **options)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(save_directory)

    @classmethod
    def read(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> Self:
        """Load the model of a folder, in eval mode. Raises ValueError if the folder does not fit, if possible before
        it reads any weights.
        """
        where = check_folder(folder)
        configuration = cls.config_class
        assert configuration is not None
        entries = read_json(where, "config.json")
        if entries.get("model_type") != configuration.model_type:
            raise ValueError(f"model_type: got {entries.get('model_type')!r}, expected {configuration.model_type!r}.")
        try:
            with torch.device("meta"):
                check_shapes(cls(configuration.from_dict(entries)), read_shapes(where), where)
            model: Any = cls(configuration.from_dict(entries))
        except Exception as error:  # raised by whichever library checks the wrong entry
            raise ValueError(
                f"model: config.json of {where} does not describe a model ({first_line(error)})."
            ) from None
        load_strictly(model.to(dtype), read_tensors(where), where)
        if (where / GENERATION_CONFIG_NAME).is_file():
            model.generation_config = GenerationConfig.from_dict(read_json(where, GENERATION_CONFIG_NAME))
        model.name_or_path = model.config._name_or_path = str(folder)
        return model.eval()


def unpack(model: Any, codec: Any) -> tuple[Any, Any, float | None]:
    """Return the network, the codec and the guidance scale of a folder's model; for a bare network, no guidance scale.

    Args:
        codec: Replaces the model's codec if not None.
    """
    if not isinstance(model, OwnImageModel):
        return model, codec, None
    own = model.image_codec if codec is None else codec
    scale = getattr(model.generation_config, "guidance_scale", None)
    return getattr(model, model.base_model_prefix), own, 1.0 if scale is None else float(scale)
