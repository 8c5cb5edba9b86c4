"""Every configuration that SpecForge ships: the form that a drafter is recognised as, or the name that refuses it.

`specforge_configs.json` has the entries that a reader looks at, as they stood in August 2026 (sgl-project/SpecForge).
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from visspec.models.published import form_of

CONFIGS = json.loads(Path(__file__).with_name("specforge_configs.json").read_text())
SPLIT = {"fc.weight", "midlayer.hidden_norm.weight", "layers.0.self_attn.q_proj.weight"}
VERDICTS = {  # by architecture: the reader and the form, or None where it is refused by name; and how many there are
    "LlamaForCausalLMEagle3": (("eagle", "eagle3"), 27),
    "DFlashDraftModel": (("dflash", "dflash"), 8),
    "DSparkDraftModel": (("dflash", "dspark"), 6),
    "DominoDraftModel": (("dflash", "domino"), 3),
    "PEagleDraftModel": (None, 1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_form_of_a_configuration(tmp_path, name):
    data = CONFIGS[name]
    kind = data["architectures"][0]
    wanted, _ = VERDICTS[kind]
    if wanted:
        assert form_of(tmp_path, data, SPLIT) == wanted
    else:
        with pytest.raises(ValueError, match=f"is a checkpoint of '{kind}', expected"):
            form_of(tmp_path, data, SPLIT)


def test_all_of_them_are_judged():
    found = Counter(data["architectures"][0] for data in CONFIGS.values())
    assert found == {kind: count for kind, (_, count) in VERDICTS.items()}
