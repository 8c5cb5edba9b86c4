"""`visspec train drafter`: trains a drafter for a target of text (--data) or of images (--prompts)."""

from dataclasses import fields

from visspec.api.training.options import DrafterTraining as Options


def run(arguments: Options) -> None:
    changed = {f.name: value for f in fields(arguments) if (value := getattr(arguments, f.name)) not in (f.default, [])}
    if arguments.preset == "context":
        from visspec.api.training import context as train_context

        del changed["preset"]
        allowed = {"target", "out", "overwrite", "seed", "device", "dtype", "trust_remote_code"}
        if strange := sorted({*changed} - allowed):
            raise ValueError(f"--{strange[0].replace('_', '-')}: --preset context has no such option. Leave it out.")
        train_context.run(**changed)
    elif arguments.data is not None:
        from visspec.api.training import drafter as train_drafter

        train_drafter.run(**changed)
    else:
        from visspec.api.training import image_drafter as train_image_drafter

        train_image_drafter.run(**changed)
