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
import json
import sys
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
from tests.tiny import FAMILIES, model_of, prompt, shapes  # noqa: E402

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


def texts() -> Iterator[Case]:
    """Tiny random decoders: drafters by rules, alone and in a ragged batch, three seeds where tokens are drawn."""
    for name in FAMILIES:
        for shape in ("one", "ragged"):
            inputs, answers = prompt(name, shapes(name)[shape]), stock(name, shape)
            for rule, options in TEXT:
                drafters = {
                    "none": None, "ngram": "ngram", "oracle": Oracle(answers), "tree": TreeOracle(answers, wrong=0.4),
                    "tree_per_row": TreeOracle(answers, wrong=0.4, per_row=True), "grown": Grower(answers),
                    "hostile": Hostile(),
                }  # fmt: skip
                if name == "llama":
                    drafters["small_model"] = tiny.llama(seed=1, hidden_size=16, num_attention_heads=2, head_dim=8)
                for kind, drafter in drafters.items():
                    import visspec

                    fast = visspec.accelerate(model_of(name), drafter, acceptance=rule, adaptive=False)
                    found = []
                    for seed in range(3 if options["do_sample"] else 1):
                        given = {"seed": seed} if options["do_sample"] else {}
                        output = fast.generate(**inputs, **options, **given, max_new_tokens=20)
                        found.append([new_tokens(output, inputs), fast.last_stats.rounds])
                    yield f"text/{name}/{shape}/{rule}/{'sampled' if options['do_sample'] else 'greedy'}/{kind}", found


def images() -> Iterator[Case]:
    """Tiny random image models: drafters and rules that need no training, greedy and drawn, alone and ragged."""
    from visspec import registry

    for name in CASES:
        for spec, rule in IMAGES:
            for rows in ([0], [0, 1, 2]):
                for temperature in (0.0, 1.0):
                    drafter = None if spec is None else registry.drafter(spec, None)[0]
                    uniforms = rule not in ("exact",) and not rule.startswith("local")
                    if uniforms and temperature == 0.0:
                        continue
                    case = f"image/{name}/{spec}/{rule}/{len(rows)}/{temperature}"
                    try:
                        tokens, state = draw(made(name), rows, drafter, bound(name, rule), temperature)
                    except ValueError as refusal:  # no codebook, say
                        yield case, str(refusal)
                    else:
                        yield case, [tokens, len(state.trace.rounds)]


def bound(name: str, rule: str) -> Any:
    from visspec import registry
    from visspec.models.image_codes.target import ImageAR

    found = registry.rule(rule)
    found.bind(ImageAR(made(name).family).capabilities)
    return found


def shipped() -> Iterator[Case]:
    """The painter under every preset, and the captioner with its drafter under every rule that takes it."""
    from visspec import ImagePipeline, accelerate, registry
    from visspec.api import loading as targets
    from visspec.api.captions import prepare
    from visspec.io import included

    pipe = ImagePipeline.from_pretrained("painter")
    pipe.set_progress_bar_config(disable=True)
    for name in registry.presets("codes"):
        drafter, rule, order = registry.presets("codes")[name].method.values()
        for temperature in (0.7, 0.0) if rule == "exact" else (0.7,):
            out = pipe(
                ["a photo of a red cross left of a blue ring", "a photo of three stars"], seed=3, drafter=drafter,
                acceptance=rule, order=order, temperature=temperature, output_type="latent",
            )  # fmt: skip
            # the trained drafter's chains adapt their depth by the clock: tokens do not depend on it, passes do
            passes = [int(p.max()) for p in out.passes] if name != "drafter" else []
            yield f"painter/{name}/{temperature}", [[t.tolist() for t in out.tokens], passes]
    model, processor = targets.load(str(registry.CHECKPOINTS / "captioner"))
    pictures = included.scenes("shapes").images(3)
    inputs = prepare(processor, pictures, "describe the picture in detail .", model)
    for drafter in ("none", "ngram", "vispec"):
        for rule in ("exact", "rejection", "typical"):
            if drafter == "vispec" and rule == "typical":
                continue
            fast = accelerate(model, drafter, acceptance=rule, adaptive=False)
            for options in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
                output = fast.generate(**inputs, **options, max_new_tokens=64)
                kind = "sampled" if options["do_sample"] else "greedy"
                yield f"captioner/{drafter}/{rule}/{kind}", [output.tolist(), fast.last_stats.rounds]


PAINTERS = {  # included painter: prompt, what it draws
    "painter-emoji": ("a photo of a penguin", "codes"),
    "painter-any-order": ("a photo of a cat", "any order"),
    "painter-mar": ("a photo of a penguin", "vectors"),
    "painter-var": ("a photo of a penguin", "maps"),
}


def value_of(part: Any) -> Any:
    """The tokens or vectors of one picture, as JSON can hold them."""
    return (part * 1e4).round().tolist() if part.is_floating_point() else part.tolist()


def painters() -> Iterator[Case]:
    """The other included painters under every preset of their kind, at their own guidance and temperature."""
    from visspec import ImagePipeline, registry

    for name, (text, draws) in PAINTERS.items():
        plain = ImagePipeline.from_pretrained(name)
        for preset in registry.presets(draws):
            case = f"{name}/{preset}"
            try:
                found = registry.preset(preset, draws, plain.model)
                pipe = plain if not found.parts else ImagePipeline.from_pretrained(name, parts=found.parts)
                pipe.set_progress_bar_config(disable=True)
                method = {"drafter": found.drafter, "acceptance": found.acceptance, "order": found.order}
                # depths that follow the clock change passes, and tokens of rules that draw for themselves
                if "eagle" in found.drafter:
                    continue
                out = pipe(text, seed=3, output_type="latent", **method)
                yield case, [[value_of(t) for t in out.tokens], [int(p.max()) for p in out.passes]]
            except (ValueError, TypeError) as refusal:
                yield case, str(refusal)[:60]


def streams() -> Iterator[Case]:
    """A stream of the included captioner: six pictures through three slots, greedy and drawn."""
    from visspec import accelerate, registry
    from visspec.api import loading as targets
    from visspec.api.captions import prepare
    from visspec.io import included

    model, processor = targets.load(str(registry.CHECKPOINTS / "captioner"))
    pictures = included.scenes("shapes").images(6)
    entries = [prepare(processor, [picture], "describe the picture in detail .", model) for picture in pictures]
    for drafter in ("none", "ngram", "suffix", "vispec"):
        fast = accelerate(model, drafter, adaptive=False)
        for options in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
            answers = sorted(fast.stream(iter(entries), slots=3, max_new_tokens=48, **options), key=lambda a: a.id)
            kind = "sampled" if options["do_sample"] else "greedy"
            yield f"stream/{drafter}/{kind}", [list(answer.tokens) for answer in answers]


def trained() -> Iterator[Case]:
    """A drafter of a tiny model, trained for twelve steps."""
    import tempfile

    from tests.test_train import trainer

    with tempfile.TemporaryDirectory() as folder:
        drafter, run = trainer(Path(folder))
        run.run(lambda record: None)
        yield "train/llava", {k: (v * 1e4).round().tolist() for k, v in drafter.head.state_dict().items()}


def digests(parts: tuple = (texts, images, shipped, painters, streams, trained)) -> dict[str, str]:
    """{case: sha256 of its output}."""
    found: dict[str, str] = {}
    for part in parts:
        torch.manual_seed(0)
        for name, output in part():
            found[name] = hashlib.sha256(json.dumps(output).encode()).hexdigest()[:16]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier result: name the cases that differ")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = digests()
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} cases")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())
    gone = sorted(before.keys() - found.keys())
    other = sorted(name for name, digest in found.items() if before.get(name, digest) != digest)
    print(f"{len(gone)} cases are gone, {len(found.keys() - before.keys())} are new")
    print("\n".join(other) if other else "every other digest is the same")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
