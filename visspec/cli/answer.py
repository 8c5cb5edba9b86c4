"""`visspec answer`: several models answer a question about an image, agreement selects, a large model decides."""

from dataclasses import dataclass
from pathlib import Path

from visspec.cli.arguments import SamplingOptions
from visspec.io.options import HardwareOptions, Positive, option


@dataclass(kw_only=True)
class Options(SamplingOptions, HardwareOptions):
    image: Path = option("an image file", positional=True)
    question: str = option("question about the image", positional=True)
    drafts: list[str] = option("two or more models: included names, folders or hub ids", metavar="MODEL")
    model: str = option("the large model that decides")
    keep: Positive = option("number of drafts for the large model", 3)


def run(arguments: Options) -> None:
    from visspec.api import loading, verdict
    from visspec.api.text.accelerate import accelerate
    from visspec.io.images import open_image

    image = open_image(arguments.image)
    names = dict.fromkeys((*arguments.drafts, arguments.model))
    loaded = {name: loading.load(name, needs_pictures=True, **arguments.hardware) for name in names}
    members = {name: verdict.Member(name, accelerate(model), processor) for name, (model, processor) in loaded.items()}
    options = arguments.generation | {"keep": arguments.keep, "seed": arguments.seed}
    drafts = [members[name] for name in arguments.drafts]
    result = verdict.decide(drafts, members[arguments.model], image, arguments.question, **options)
    for i, (name, answer) in enumerate(zip(arguments.drafts, result["drafts"])):
        score = f"{result['scores'][i]:.3f}" if i in result["scores"] else "-"
        print(f"{'*' if i in result['chosen'] else ' '} {name} ({score}): {answer}")
    print(f"{result['answer']}\nguarantee: {result['guarantee']}")
