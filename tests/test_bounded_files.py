"""Files that ask for unbounded work, or that libraries fail on, are refused with one message."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import ProcessorMixin

from tests.doubles import raises_line
from visspec.api import captions, loading
from visspec.models.scales.multiscale import ScaleSizes
from visspec.models.var.layout import VARImageConfig

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "what ?"}]}]


class Templated(ProcessorMixin):
    def __init__(self, template):
        self.chat_template, self.tokenizer = template, SimpleNamespace(special_tokens_map={})


@pytest.mark.parametrize(("template", "why"), [
    ("{{ ''.__class__.__mro__ }}", "access to attribute"), ("{{ range(10000000) }}", "Range too big"),
    ("{{ messages.nothing.more }}", "no attribute 'nothing'"),
], ids=["attribute", "range", "undefined"])  # fmt: skip
def test_chat_templates_that_fail(template, why):
    with pytest.raises(ValueError, match="^chat_template: the processor's template failed .*" + why) as error:
        captions.chat_text(Templated(template), MESSAGES)
    assert "\n" not in str(error.value)


def written(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_negative_sizes_refused(tmp_path):
    from transformers import JanusConfig

    config = JanusConfig().to_dict()
    config |= {"architectures": ["JanusForConditionalGeneration"]}
    config["text_config"] = config["text_config"] | {"hidden_size": -1, "num_hidden_layers": 1}
    folder = written(tmp_path / "m", config, {"a": torch.zeros(8, 8)})
    for load in (loading.load_image_model, loading.load_saved):
        with pytest.raises(ValueError, match=f"^model: {folder} could not be loaded") as error:
            load(str(folder))
        assert "\n" not in str(error.value)


def test_maps_of_any_size_are_refused():
    for make in (
        lambda: ScaleSizes(((1, 1), (10**6, 10**6))),
        lambda: VARImageConfig(grids=[[10**6, 10**6]]),
        lambda: ScaleSizes(tuple((1024, 1000) for _ in range(5))),
    ):
        with raises_line("scales: got .* codes in .* maps, expected 1..1048576"):
            make()
