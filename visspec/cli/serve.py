"""`visspec serve`: a model behind OpenAI's HTTP interface, on this machine unless told otherwise."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from visspec.cli.arguments import ModelOptions, Positive, load, number
from visspec.io.options import option

KEY = "VISSPEC_API_KEY"
Port = Annotated[int, number(int, lambda value: 0 <= value < 1 << 16, "a number from 0 to 65535")]
MMAP_THRESHOLD = -3  # glibc's name for it in mallopt


@dataclass(kw_only=True)
class Options(ModelOptions):
    host: str = option("default: this machine only", "127.0.0.1")
    port: Port = option(default=8000)
    image_model: str | None = option("also serve images/generations: included name, folder or hub id", None)
    slots: Positive = option("answers written at once", 8)
    places: Positive = option("requests taken at once, those that wait included", 64)
    max_new_tokens: Positive = option("of an answer that asks for no number", 512)
    max_body: Positive = option("bytes of a request", 20_000_000)
    max_pixels: Positive = option("of an image", 16_000_000)
    max_images: Positive = option("of a request", 16)
    pixels_at_once: Positive = option(
        "of a request's images together, and of all images that are decoded at once", 128_000_000
    )
    prefix_cache: int = option(
        "bytes of prompts kept for those that begin alike, such as chats that go on; 0: none", 1 << 29
    )
    grace: Positive = option("seconds for running answers after SIGTERM", 60)


def run(arguments: Options) -> int:
    """Serve until SIGTERM or Ctrl-C; what runs is finished then."""
    from visspec.api.sources import need

    for package in ("fastapi", "uvicorn"):
        need(package, "serve", "serve")
    from visspec.api.server import LOCAL, Server

    with suppress(OSError, AttributeError):  # else each thread keeps the memory of the pictures that it decoded
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 1 << 20)
    key = os.environ.get(KEY) or None
    service = make_service(arguments, key, arguments.host in LOCAL)
    if key is None and not service.local:
        print(f"visspec: anybody who reaches {arguments.host} can use this server; {KEY} sets a key", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when all is done
    try:
        Server(service, arguments.host, arguments.port, arguments.grace).run()
    except KeyboardInterrupt:  # the same of Ctrl-C
        pass
    return 0


def make_service(arguments: Options, key: str | None, local: bool) -> Any:
    """The service: models loaded, threads started."""
    from visspec.api.accelerate import accelerate
    from visspec.api.completions import RequestLimits
    from visspec.api.images import ImagePipeline
    from visspec.api.server import Service
    from visspec.api.serving import BODIES, ImageWorker, RequestQueue, ServerMetrics, TextWorker
    from visspec.io import included

    model, processor, drafter = load(arguments)
    fast = accelerate(model, drafter, acceptance=arguments.acceptance)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = RequestLimits(
        body=arguments.max_body,
        pixels=arguments.max_pixels,
        at_once=max(arguments.pixels_at_once, arguments.max_pixels),
        images=arguments.max_images,
        new=arguments.max_new_tokens,
        context=context,
    )
    meters, painting = ServerMetrics(), None
    if arguments.image_model is not None:
        pipe = ImagePipeline.from_pretrained(arguments.image_model, **arguments.hardware)
        pipe.set_progress_bar_config(disable=True)
        painting = ImageWorker(arguments.image_model, pipe, meters)
    name, room = arguments.model or included.text_model(), arguments.prefix_cache
    writing = TextWorker(name, fast, processor, meters, arguments.slots, limits, room)
    desk = RequestQueue(arguments.places, meters, limits.at_once, max(BODIES, limits.body))
    return Service(desk, writing, painting, key, local)
