"""`visspec serve`: a model behind OpenAI's HTTP interface, on this machine unless told otherwise."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from visspec.cli.arguments import add_hardware, load, positive

KEY = "VISSPEC_API_KEY"
MMAP_THRESHOLD = -3  # glibc's name for it in mallopt


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", help="folder or hub id of a vision-language model (default: an included one)")
    parser.add_argument("--image-model", help="also serve images/generations: included name, folder or hub id")
    parser.add_argument("--drafter", help="name with options, or folder (default: the model's own, else ngram)")
    parser.add_argument("--acceptance", default="exact", help="rule and options, e.g. typical:epsilon=0.1")
    add_hardware(parser)
    parser.add_argument("--slots", type=positive, default=8, help="answers written at once")
    parser.add_argument("--places", type=positive, default=64, help="requests taken at once, those that wait included")
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="of an answer that asks for no number")
    parser.add_argument("--max-body", type=positive, default=20_000_000, help="bytes of a request")
    parser.add_argument("--max-pixels", type=positive, default=16_000_000, help="of an image")
    parser.add_argument("--max-images", type=positive, default=16, help="of a request")
    parser.add_argument(
        "--pixels-at-once", type=positive, default=128_000_000,
        help="of a request's images together, and of all images that are decoded at once",
    )  # fmt: skip
    parser.add_argument("--grace", type=positive, default=60, help="seconds for running answers after SIGTERM")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; what runs is finished then."""
    if not 0 <= arguments.port < 1 << 16:
        raise ValueError(f"--port: got {arguments.port}, expected a number from 0 to 65535")
    for package in ("fastapi", "uvicorn"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise ValueError(f"serve: {package} is not installed, expected it (pip install 'visspec[serve]')") from None
    from visspec.api.server import LOCAL, Server

    with suppress(OSError, AttributeError):  # else each thread keeps the memory of the pictures that it decoded
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 1 << 20)
    key = os.environ.get(KEY) or None
    service = made(arguments, key, arguments.host in LOCAL)
    if key is None and not service.local:
        print(f"visspec: anybody who reaches {arguments.host} can use this server; {KEY} sets a key", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when all is done
    try:
        Server(service, arguments.host, arguments.port, arguments.grace).run()
    except KeyboardInterrupt:  # the same of Ctrl-C
        pass
    return 0


def made(arguments: argparse.Namespace, key: str | None, local: bool) -> Any:
    """The service: models loaded, threads started."""
    from visspec.api.accelerate import accelerate
    from visspec.api.completions import RequestLimits
    from visspec.api.images import ImagePipeline
    from visspec.api.server import Service
    from visspec.api.serving import BODIES, ImageWorker, RequestQueue, ServerMetrics, TextWorker
    from visspec.io import included

    model, processor, drafter = load(arguments)
    fast = accelerate(model, drafter, acceptance=arguments.acceptance)
    limits = RequestLimits(
        body=arguments.max_body, pixels=arguments.max_pixels, images=arguments.max_images,
        at_once=max(arguments.pixels_at_once, arguments.max_pixels), new=arguments.max_new_tokens,
        context=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )  # fmt: skip
    pipe = None
    if arguments.image_model is not None:
        hardware = {name: getattr(arguments, name) for name in ("device", "dtype", "trust_remote_code")}
        pipe = ImagePipeline.from_pretrained(arguments.image_model, **hardware)
        pipe.set_progress_bar_config(disable=True)
    meters = ServerMetrics()
    writing = TextWorker(arguments.model or included.text_model(), fast, processor, meters, arguments.slots, limits)
    painting = None if pipe is None else ImageWorker(arguments.image_model, pipe, meters)
    desk = RequestQueue(arguments.places, meters, limits.at_once, max(BODIES, limits.body))
    return Service(desk, writing, painting, key, local)
