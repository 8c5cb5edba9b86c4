"""The command line: finds the file of a command, `visspec/cli/<command>.py`, and turns errors into exit codes.

Exit code 2 for bad input or a target that can't be written, 1 when some files failed, 130 when interrupted, 141 when
the reader of the output has gone (`| head`).
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

COMMANDS = {  # `bench image` is in bench_image.py: a dataclass `Options`, if it has any, and `run`, which takes one
    "demo": "caption rendered scenes with and without acceleration, side by side",
    "caption": "caption image files, folders, tables and shards",
    "generate": "draw images from a prompt",
    "answer": "several models answer about an image, agreement selects, a large one decides",
    "serve": "answer OpenAI's clients over HTTP: chats with images, and images from prompts",
    "bench": "measure",
    "bench text": "a text model's drafters against transformers' generate and prompt lookup, by kind of prompt",
    "bench caption": "captioning against transformers' generate and assisted modes",
    "bench image": "methods of image generation against stock generate",
    "bench sizes": "passes and loops at the sizes of real models, with random weights and an oracle drafter",
    "bench kernels": "time of each kernel beside eager torch",
    "train": "train",
    "train drafter": "distil a feature drafter for a target, in process",
    "convert": "make a folder of weights that were published in a layout of their own (LlamaGen, VAR, MAR, ...)",
    "export": "write a trained drafter in the form of other engines",
    "tune": "choose drafter, length and batch for a model and images, by measurement",
    "eval": "judge images: FID, KID, GenEval, CLIPScore",
    "eval fid": "Frechet distance of two folders",
    "eval kid": "kernel distance of two folders",
    "eval clipscore": "CLIPScore of images and their captions",
    "eval geneval": "GenEval of a folder in its own layout, or flat with --prompts",
    "report": "one HTML page from the JSON of benches",
    "list": "names of drafters, rules, checkpoints",
    "doctor": "versions, device, what will run and what will not",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    arguments = parser().parse_args(argv)
    if "run" not in arguments:
        arguments.show()
        return 0
    shown = warnings.showwarning
    try:
        if shown.__module__ == "warnings":  # a test that records warnings has its own
            warnings.showwarning = lambda message, *_: print(f"visspec: {message}", file=sys.stderr)
        code = arguments.run(read_options(arguments, arguments.options)) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or python says so once more when it ends
        return 141
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None)  # of what the system refused
        where = getattr(error, "filename", None)
        print(f"visspec: {f'{where}: {reason}' if reason and where else reason or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("visspec: interrupted; what was written stays", file=sys.stderr)
        return 130
    finally:
        warnings.showwarning = shown


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help texts that end with the default, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default is not False and action.default not in (None, [], argparse.SUPPRESS)
        return super()._get_help_string(action) if shown else action.help


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is behind --help. A command's file is imported when it is named."""

    command = ""

    def parse_known_args(self, args=None, namespace=None):
        if not self.command:
            return super().parse_known_args(args, namespace)
        name = "eval" if self.command.startswith("eval ") else self.command.replace(" ", "_")  # one file has several
        module = importlib.import_module(f"visspec.cli.{name}")
        several = getattr(module, "OPTIONS", {})
        options = several[self.command] if several else getattr(module, "Options", NoOptions)
        add_options(self, options)
        self.set_defaults(run=module.run, options=options)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            near = nearest(rest[0], self._option_string_actions) if rest[0].startswith("-") else ""
            self.error(
                f"{self.command}: unknown argument {rest[0]}" + (f", expected one such as {near}" if near else "")
            )
        return found, rest

    def error(self, message: str):
        if kind := re.fullmatch(r"(.+): invalid (int|float) value: '(.*)'", message):
            message = f"{kind[1]}: got {kind[3]}, expected a {'whole ' if kind[2] == 'int' else ''}number"
        if choice := re.fullmatch(r"(?:argument )?(.+): invalid choice: (.+) \(choose from (.+)\)", message):
            name, got, known = choice[1], *(re.sub("['\"]", "", text) for text in choice.groups()[1:])
            names = known.split(", ")
            message = (
                f"{name}: got {got}, expected {known if len(names) <= 8 else f'one such as {nearest(got, names)}'}"
            )
        self.exit(2, f"visspec: {message.removeprefix('argument ')}\n")


def parser() -> Parser:
    """The parser of all commands, without the options of any."""
    top = Parser(prog="visspec", description="Several tokens per pass of the big model.")
    top.add_argument("--version", action="version", version=f"visspec {__version__}")
    top.set_defaults(show=top.print_help)
    below = {"": top.add_subparsers(dest="command", metavar="command")}
    for name, what in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        one = below[group].add_parser(last, help=what, formatter_class=HelpFormatter)
        if any(other.startswith(f"{name} ") for other in COMMANDS):
            one.set_defaults(show=one.print_help)
            below[name] = one.add_subparsers(dest="what", metavar="what")
        else:
            one.command = name
    return top


if __name__ == "__main__":
    sys.exit(main())
