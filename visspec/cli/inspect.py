"""`visspec inspect`: what the checkpoint of a drafter is, and whether it fits a target, before it is loaded."""

from dataclasses import asdict, dataclass
from typing import Any

from visspec.cli.arguments import JsonOption
from visspec.io.options import option


@dataclass(kw_only=True)
class Options(JsonOption):
    drafter: str = option(
        "folder, hub id or included name, with options behind a colon as --drafter takes", positional=True
    )
    target: str | None = option(
        "folder, hub id, included name or config.json of the model that it is to draft for", None
    )


def run(arguments: Options) -> None:
    from transformers.utils import logging

    from visspec.api.inspection import inspect
    from visspec.io.files import write_json

    logging.disable_progress_bar()
    found = asdict(inspect(arguments.drafter, arguments.target))
    print("\n".join(lines(arguments.drafter, found, arguments.target)))
    write_json(arguments.json, found)


def lines(name: str, found: dict[str, Any], target: str | None) -> list[str]:
    """The page of an `Inspection`."""
    said = [f"{name}: {found['form'] or 'a form that is not known'}"]
    if found["layers"] is not None:
        said.append(f"layers: {found['layers']} ({found['convention']}), hidden states {found['hidden_states']}")
        if found["convention"] == "boundary":
            said[-1] += ", of which the highest is the last layer's output before the final norm"
    elif found["convention"]:
        said.append(f"layers: {found['convention']}, which the depth of a --target tells")
    if positions := found["positions"]:
        rest = ", ".join(f"{key} {value}" for key, value in positions.items() if key != "counted" and value != [])
        said.append(f"positions: by {positions['counted']}, {rest}")
    vocabulary, few = (found["vocabulary"].get(key) for key in ("target", "draft"))
    if vocabulary:
        said.append(f"vocabulary: {vocabulary} ids, {f'{few} of them drafted' if few else 'by the head of the target'}")
    tensors = found["tensors"]
    count = tensors["count"] if tensors else "no weights there, judged by the configuration alone"
    said.append(f"tensors: {count}")
    for key in ("missing", "unexpected"):
        if tensors and tensors[key]:
            said.append(f"  {key}: {', '.join(tensors[key])}")
    said += [f"note: {note}" for note in found["notes"]]
    if found["refused"]:
        return [*said, f"refused: {found['refused']}"]
    if found["fits"]:
        return [*said, f"verdict: fits {target or 'the model in its folder'}"]
    return [*said, "verdict: a form that is read" if target is None else f"verdict: not judged for {target}"]
