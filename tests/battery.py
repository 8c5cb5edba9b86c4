"""Outputs for fixed seeds, as one digest a case: what a change of structure must leave as it is.

    python -P tests/battery.py before.json                     # at the commit before
    python -P tests/battery.py after.json --against before.json

Cases: every stock family of `tiny`, with drafters and rules; every image family and the shipped painter, with every
preset; the other included painters; the included captioner with its drafter, in streams too; a training.
A digest covers the tokens and the number of passes; it holds on one machine, since another may round otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# `tests` by its folder: the repository's root on `sys.path` would shadow packages, and another one may be installed
package = types.ModuleType("tests")
package.__path__ = [str(Path(__file__).parent)]
sys.modules.setdefault("tests", package)

from tests import tiny  # noqa: E402
from tests.doubles import Grower, Hostile, Oracle, TreeOracle, new_tokens, stock  # noqa: E402
from tests.image_cases import CASES, draw, made  # noqa: E402
from tests.test_train import trainer  # noqa: E402
from tests.tiny import FAMILIES, model_of, prompt, shapes  # noqa: E402
from visspec import ImagePipeline, accelerate, registry  # noqa: E402
from visspec.api.captions import prepare  # noqa: E402
from visspec.api.loading import load  # noqa: E402
from visspec.io import included  # noqa: E402
from visspec.models.image_codes.target import ImageAR  # noqa: E402

Case = tuple[str, Any]  # its name, and whatever JSON can hold of its output

TEXT = (  # rule, settings of generate
    ("exact", {"do_sample": False}),
    ("exact", {"do_sample": True, "temperature": 0.9, "top_k": 20}),
    ("rejection", {"do_sample": True, "temperature": 1.0}),
    ("typical:epsilon=0.3", {"do_sample": True, "temperature": 0.8, "top_p": 0.9}),
)
IMAGES = (  # drafter of every image family, rule
    (None, "exact"),
    ("jacobi:window=6", "exact"),
    ("jacobi:window=6,redraw=maximal", "rejection"),
    ("jacobi:window=6,redraw=independent,start=random", "grouped:group=6"),
    ("jacobi:window=6,redraw=maximal", "lantern:k=5,delta=0.2"),
    ("jacobi:window=6,redraw=maximal", "lantern_plus:k=5,lam=2"),
    ("jacobi:window=6,redraw=maximal", "cool:omega=1.3"),
    ("jacobi:window=6", "local:tau=0.2,k=3"),
)
PAINTERS = {  # included painter: prompts, what it draws, temperatures (None: its own)
    "painter": (["a photo of a red cross left of a blue ring", "a photo of three stars"], "codes", (0.7, 0.0)),
    "painter-emoji": ("a photo of a penguin", "codes", (None,)),
    "painter-any-order": ("a photo of a cat", "any order", (None,)),
    "painter-mar": ("a photo of a penguin", "vectors", (None,)),
    "painter-var": ("a photo of a penguin", "maps", (None,)),
}


def kind_of(options: dict[str, Any]) -> str:
    return "sampled" if options["do_sample"] else "greedy"


def texts() -> Iterator[Case]:
    """Tiny random decoders: drafters by rules, alone and in a ragged batch, three seeds where tokens are drawn."""
    for name, shape, (rule, options) in itertools.product(FAMILIES, ("one", "ragged"), TEXT):
        inputs, answers = prompt(name, shapes(name)[shape]), stock(name, shape)
        drafters = {
            "none": None, "ngram": "ngram", "oracle": Oracle(answers), "tree": TreeOracle(answers, wrong=0.4),
            "tree_per_row": TreeOracle(answers, wrong=0.4, per_row=True), "grown": Grower(answers),
            "hostile": Hostile(),
        }  # fmt: skip
        if name == "llama":
            drafters["small_model"] = tiny.llama(seed=1, hidden_size=16, num_attention_heads=2, head_dim=8)
        for kind, drafter in drafters.items():
            fast, result = accelerate(model_of(name), drafter, acceptance=rule, adaptive=False), []
            for given in [{"seed": seed} for seed in range(3)] if options["do_sample"] else [{}]:
                output = fast.generate(**inputs, **options, **given, max_new_tokens=20)
                result.append([new_tokens(output, inputs), fast.last_stats.rounds])
            yield f"text/{name}/{shape}/{rule}/{kind_of(options)}/{kind}", result


def images() -> Iterator[Case]:
    """Tiny random image models: drafters and rules that need no training, greedy and drawn, alone and ragged."""
    for name, (spec, rule), rows, temperature in itertools.product(CASES, IMAGES, ([0], [0, 1, 2]), (0.0, 1.0)):
        if temperature == 0.0 and not rule.startswith(("exact", "local")):
            continue  # rules of uniform numbers
        drafter, case = None if spec is None else registry.drafter(spec, None)[0], made(name)
        try:
            judge = registry.rule(rule)
            judge.bind(ImageAR(case.family).capabilities)
            tokens, state = draw(case, rows, drafter, judge, temperature)
            result = [tokens, len(state.trace.rounds)]
        except ValueError as refusal:  # no codebook, say
            result = str(refusal)
        yield f"image/{name}/{spec}/{rule}/{len(rows)}/{temperature}", result


def value_of(part: Any) -> Any:
    """The tokens or vectors of one picture, as JSON can hold them."""
    return (part * 1e4).round().tolist() if part.is_floating_point() else part.tolist()


def painters() -> Iterator[Case]:
    """The included painters under every preset of their kind."""
    for name, (text, draws, temperatures) in PAINTERS.items():
        plain = ImagePipeline.from_pretrained(name)
        for preset, temperature in itertools.product(registry.presets(draws), temperatures):
            case = f"{name}/{preset}" + ("" if temperature is None else f"/{temperature}")
            try:
                result = registry.preset(preset, draws, plain.model)
                # depths that follow the clock change passes, and tokens of rules that draw for themselves
                by_clock = "eagle" in result.drafter and name != "painter"
                if by_clock or (temperature == 0.0 and result.acceptance != "exact"):
                    continue
                pipe = plain if not result.parts else ImagePipeline.from_pretrained(name, parts=result.parts)
                pipe.set_progress_bar_config(disable=True)
                options = {} if temperature is None else {"temperature": temperature}
                out = pipe(text, seed=3, output_type="latent", **result.method, **options)
                passes = [] if preset == "drafter" else [int(p.max()) for p in out.passes]
                yield case, [[value_of(t) for t in out.tokens], passes]
            except (ValueError, TypeError) as refusal:
                yield case, str(refusal)[:60]


def captioner() -> Iterator[Case]:
    """The included captioner with drafters and rules, in a batch and in a stream of six pictures in three slots."""
    model, processor = load(str(registry.CHECKPOINTS / "captioner"))
    pictures, text = included.scenes("shapes").images(6), "describe the picture in detail ."
    inputs, both = prepare(processor, pictures[:3], text, model), ({"do_sample": False}, {"do_sample": True, "seed": 5})
    rules = ("exact", "rejection", "typical")
    for drafter, rule, options in itertools.product(("none", "ngram", "vispec"), rules, both):
        if (drafter, rule) != ("vispec", "typical"):
            fast = accelerate(model, drafter, acceptance=rule, adaptive=False)
            output = fast.generate(**inputs, **options, max_new_tokens=64)
            yield f"captioner/{drafter}/{rule}/{kind_of(options)}", [output.tolist(), fast.last_stats.rounds]
    entries = [prepare(processor, [picture], text, model) for picture in pictures]
    for drafter, options in itertools.product(("none", "ngram", "context", "vispec"), both):
        fast = accelerate(model, drafter, adaptive=False)
        answers = sorted(fast.stream(iter(entries), slots=3, max_new_tokens=48, **options), key=lambda a: a.id)
        yield f"stream/{drafter}/{kind_of(options)}", [list(answer.tokens) for answer in answers]


def trained() -> Iterator[Case]:
    """A drafter of a tiny model, trained for twelve steps."""
    with tempfile.TemporaryDirectory() as folder:
        drafter, run = trainer(Path(folder))
        run.run(lambda record: None)
        yield "train/llava", {k: (v * 1e4).round().tolist() for k, v in drafter.head.state_dict().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier result: name the cases that differ")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result: dict[str, str] = {}
    for part in (texts, images, painters, captioner, trained):
        torch.manual_seed(0)
        for name, output in part():
            result[name] = hashlib.sha256(json.dumps(output).encode()).hexdigest()[:16]
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(result)} cases")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())
    gone = sorted(before.keys() - result.keys())
    other = sorted(name for name, digest in result.items() if before.get(name, digest) != digest)
    print(f"{len(gone)} cases are gone, {len(result.keys() - before.keys())} are new")
    print("\n".join(other) if other else "every other digest is the same")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
