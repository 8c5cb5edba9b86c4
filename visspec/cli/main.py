"""The command line: finds the file of a command, `visspec/cli/<command>.py`, and turns errors into exit codes.

Exit codes: 2 for bad input or an output that can't be written, 1 if some files failed, 130 if interrupted, 141 if the
reader of the output has closed it (`| head`).
"""

import argparse
import importlib
import os
import re
import sys
import warnings

from visspec import __version__
from visspec.cli.arguments import NoOptions, read_options
from visspec.io.options import add_options, nearest

COMMANDS = {  # `bench image` is in bench_image.py, with an optional dataclass `Options` and the function `run`
    "demo": "caption rendered scenes with and without acceleration, side by side",
    "caption": "caption image files, folders, tables and shards",
    "generate": "draw images from a prompt",
    "answer": "answer a question about an image with several models; a large one decides",
    "serve": "serve OpenAI's HTTP API: chats with images, and images from prompts",
    "bench": "measure",
    "bench text": "drafters of a text model against transformers' generate and prompt lookup, by kind of prompt",
    "bench caption": "captioning against transformers' generate and assisted modes",
    "bench image": "methods of image generation against stock generate",
    "bench sizes": "speed at the sizes of real models, with random weights and an oracle drafter",
    "bench kernels": "time of each kernel against eager torch",
    "train": "train",
    "train drafter": "train a drafter for a target",
    "convert": "convert weights published in their own layout (LlamaGen, VAR, MAR, ...)",
    "export": "export a trained drafter for other engines",
    "tune": "choose drafter, length and batch size for a model and inputs, by measurement",
    "eval": "evaluate images: FID, KID, GenEval, CLIPScore",
    "eval fid": "Frechet distance of two folders",
    "eval kid": "kernel distance of two folders",
    "eval clipscore": "CLIPScore of images and their captions",
    "eval geneval": "GenEval of a folder in its layout, or flat with --prompts",
    "report": "write an HTML page from the JSON of benches",
    "list": "list names of drafters, rules, checkpoints",
    "doctor": "report versions, device, and what will run",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # file names may not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    arguments = parser().parse_args(argv)
    if "run" not in arguments:
        arguments.show()
        return 0
    show_warning = warnings.showwarning
    try:
        if show_warning.__module__ == "warnings":  # not replaced by a test that records warnings
            warnings.showwarning = lambda message, *_: print(f"visspec: {message}", file=sys.stderr)
        code = arguments.run(read_options(arguments, arguments.options)) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # prevents a second message when Python exits
        return 141
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None)  # set for errors of the operating system
        where = getattr(error, "filename", None)
        print(f"visspec: {f'{where}: {reason}' if reason and where else reason or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("visspec: interrupted; finished results are kept", file=sys.stderr)
        return 130
    finally:
        warnings.showwarning = show_warning


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help texts that end with the default, if there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default is not False and action.default not in (None, [], argparse.SUPPRESS)
        return super()._get_help_string(action) if has_default else action.help


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage of --help. A command's file is imported when it is named."""

    command = ""

    def parse_known_args(self, args=None, namespace=None):
        if not self.command:
            return super().parse_known_args(args, namespace)
        # one file has all commands of `eval`
        name = "eval" if self.command.startswith("eval ") else self.command.replace(" ", "_")
        module = importlib.import_module(f"visspec.cli.{name}")
        several = getattr(module, "OPTIONS", {})
        options = several[self.command] if several else getattr(module, "Options", NoOptions)
        add_options(self, options)
        self.set_defaults(run=module.run, options=options)
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            hint = nearest(rest[0], self._option_string_actions) if rest[0].startswith("-") else ""
            self.error(f"{self.command}: unknown argument {rest[0]}{hint and f', expected one such as {hint}'}")
        return parsed, rest

    def error(self, message: str):
        if kind := re.fullmatch(r"(.+): invalid (int|float) value: '(.*)'", message):
            message = f"{kind[1]}: got {kind[3]}, expected a {'whole ' if kind[2] == 'int' else ''}number"
        if choice := re.fullmatch(r"(?:argument )?(.+): invalid choice: (.+) \(choose from (.+)\)", message):
            name, got, allowed = choice[1], *(re.sub("['\"]", "", text) for text in choice.groups()[1:])
            names = allowed.split(", ")
            expected = allowed if len(names) <= 8 else f"one such as {nearest(got, names)}"
            message = f"{name}: got {got}, expected {expected}"
        self.exit(2, f"visspec: {message.removeprefix('argument ')}\n")


def parser() -> Parser:
    """Return the parser of all commands, without their options."""
    top = Parser(prog="visspec", description="Speculative decoding for vision-language and image models.")
    top.add_argument("--version", action="version", version=f"visspec {__version__}")
    top.set_defaults(show=top.print_help)
    groups = {"": top.add_subparsers(dest="command", metavar="command")}
    for name, what in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        one = groups[group].add_parser(last, help=what, formatter_class=HelpFormatter)
        if any(other.startswith(f"{name} ") for other in COMMANDS):
            one.set_defaults(show=one.print_help)
            groups[name] = one.add_subparsers(dest="what", metavar="what")
        else:
            one.command = name
    return top


if __name__ == "__main__":
    sys.exit(main())
