"""`visspec answer`: several models answer about an image, agreement selects, a large one decides."""

from __future__ import annotations

import argparse
from pathlib import Path

from visspec.cli.arguments import add_hardware, positive, temperature
from visspec.io.files import write_json


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", type=Path, help="a PNG, JPEG or WEBP file")
    parser.add_argument("question", help="what to ask of it")
    parser.add_argument(
        "--drafts", nargs="+", required=True, metavar="MODEL", help="two or more: included names, folders or hub ids"
    )
    parser.add_argument("--model", required=True, help="the large model that decides")
    parser.add_argument("--keep", type=positive, help="drafts that it reads (default: 3, or all if there are fewer)")
    parser.add_argument("--template", help="what it is asked, with {question} and {paths}")
    parser.add_argument(
        "--drafter", default="auto", help="of all models: name with options (default: each model's own, else ngram)"
    )
    add_hardware(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--max-pixels", type=positive, default=64_000_000)
    parser.add_argument("--temperature", type=temperature, default=0.0, help="of the drafts; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write drafts, scores and the answer to this file")


def run(arguments: argparse.Namespace) -> None:
    from visspec.api import verdict
    from visspec.api.accelerate import accelerate
    from visspec.api.loading import load
    from visspec.io.images import open_image
    from visspec.io.provenance import provenance

    image = open_image(arguments.image, arguments.max_pixels)
    loaded: dict[str, verdict.Member] = {}
    for name in (*arguments.drafts, arguments.model):
        if name not in loaded:
            model, processor = load(
                name, device=arguments.device, dtype=arguments.dtype, trust_remote_code=arguments.trust_remote_code
            )
            loaded[name] = verdict.Member(name, accelerate(model, arguments.drafter), processor)
    keep = arguments.keep or min(3, len(arguments.drafts))
    panel = verdict.Panel(
        [loaded[name] for name in arguments.drafts], loaded[arguments.model], keep=keep,
        template=arguments.template or verdict.TEMPLATE,
    )  # fmt: skip
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if arguments.temperature:
        options["temperature"] = arguments.temperature
    found = panel(image, arguments.question, seed=arguments.seed, **options)
    for draft in found.drafts:
        score = "-" if draft.score is None else f"{draft.score:.3f}"
        print(f"{'*' if draft.chosen else ' '} {draft.name} ({score}): {draft.error or draft.answer}")
    print(found.answer)
    print(f"guarantee: {found.guarantee}")
    write_json(
        arguments.json,
        {
            "image": str(arguments.image), "question": arguments.question, "answer": found.answer, "text": found.text,
            "guarantee": found.guarantee, "drafts": [vars(draft) for draft in found.drafts],
            "likelihoods": found.likelihoods, "prompt": found.prompt, "model": arguments.model, "keep": keep,
            "seed": arguments.seed, "sampling": options, "provenance": provenance(loaded[arguments.model].fast.model),
        },
    )  # fmt: skip
