"""`visspec answer`: several models answer a question about an image, agreement selects, a large model decides."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visspec.cli.arguments import JsonOption, SamplingOptions
from visspec.io.files import write_json
from visspec.io.options import HardwareOptions, Positive, Temperature, option


@dataclass(kw_only=True)
class Options(JsonOption, SamplingOptions, HardwareOptions):
    image: Path = option("an image file", positional=True)
    question: str = option("question about the image", positional=True)
    drafts: list[str] = option("two or more models: included names, folders or hub ids", metavar="MODEL")
    model: str = option("the large model that decides")
    keep: Positive | None = option("number of drafts for the large model (default: 3, or all if there are fewer)", None)
    drafter: str = option("drafter of all models, a name with options; auto: each model's own, else context", "auto")
    max_pixels: Positive = option("maximum number of pixels of an image", 64_000_000)
    temperature: Temperature = option("temperature of the drafts; 0 is greedy", 0.0)
    json: Path | None = option("write drafts, scores and the answer to this file", None, writes="file")


def run(arguments: Options) -> None:
    from visspec.api import verdict
    from visspec.api.loading import load
    from visspec.api.text.accelerate import accelerate
    from visspec.io.images import open_image
    from visspec.io.provenance import provenance

    image = open_image(arguments.image, arguments.max_pixels)
    loaded: dict[str, verdict.Member] = {}
    for name in (*arguments.drafts, arguments.model):
        if name not in loaded:
            model, processor = load(name, needs_pictures=True, **arguments.hardware)
            loaded[name] = verdict.Member(name, accelerate(model, arguments.drafter), processor)
    members, judge = [loaded[name] for name in arguments.drafts], loaded[arguments.model]
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    options |= {"temperature": arguments.temperature} if arguments.temperature else {}
    asked: dict[str, Any] = {"seed": arguments.seed, "keep": arguments.keep or min(3, len(members))}
    result = verdict.decide(members, judge, image, arguments.question, **asked, **options)
    for draft in result["drafts"]:
        score = "-" if draft["score"] is None else f"{draft['score']:.3f}"
        print(f"{'*' if draft['chosen'] else ' '} {draft['name']} ({score}): {draft['error'] or draft['answer']}")
    print(result["answer"])
    print(f"guarantee: {result['guarantee']}")
    record = result | asked | {"question": arguments.question, "model": arguments.model, "image": str(arguments.image)}
    write_json(arguments.json, record | {"sampling": options, "provenance": provenance(judge.fast.model)})
