"""`visspec serve`: serves a model with OpenAI's HTTP interface, by default on this machine only."""

import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from visspec.cli.arguments import ModelOptions, load
from visspec.io.options import Positive, number, option

KEY = "VISSPEC_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")
Port = Annotated[int, number(int, lambda value: 0 <= value < 1 << 16, "a number from 0 to 65535")]


@dataclass(kw_only=True)
class Options(ModelOptions):
    host: str = option("address to listen on", "127.0.0.1")
    port: Port = option("port to listen on", 8000)
    image_model: str | None = option("image model for images/generations: included name, folder or hub id", None)
    slots: Positive = option("number of answers generated at once", 8)
    places: Positive = option("maximum number of requests, running and waiting", 64)
    max_new_tokens: Positive = option("maximum number of tokens of an answer, unless the request sets it", 512)
    max_body: Positive = option("maximum bytes of a request", 20_000_000)
    max_pixels: Positive = option("maximum total pixels of a request's images", 64_000_000)
    prefix_cache: int | None = option(
        "bytes of the prefix cache, for prompts such as continued chats; 0: none (default: 512 MiB)", None
    )
    grace: Positive = option("seconds to finish running answers after SIGTERM", 60)


def run(arguments: Options) -> int:
    """Serve until SIGTERM or Ctrl-C, and finish running answers. Returns the exit code."""
    from visspec.api.sources import need

    if arguments.batch_invariant and arguments.prefix_cache:
        raise ValueError("--prefix-cache: got it with --batch-invariant. Leave one of them out.")
    _, _, uvicorn = (need(package, "serve", "serve") for package in ("fastapi", "openai", "uvicorn"))
    from visspec.api.images.pipeline import ImagePipeline
    from visspec.api.server.app import Service, application
    from visspec.api.server.worker import TextWorker
    from visspec.io import included

    host, port, key, pipe = arguments.host, arguments.port, os.environ.get(KEY) or None, None
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ValueError(f"--host, --port: can't listen on {host}, {port} ({error}).") from None
    fast, processor = load(arguments)
    if arguments.image_model is not None:
        invariant = arguments.batch_invariant
        pipe = ImagePipeline.from_pretrained(arguments.image_model, batch_invariant=invariant, **arguments.hardware)
        pipe.set_progress_bar_config(disable=True)
    sizes = {name: getattr(arguments, name) for name in ("slots", "max_new_tokens", "max_pixels", "prefix_cache")}
    text = TextWorker(arguments.model or included.text_model(), fast, processor, **sizes)
    service, local = Service(text, pipe, arguments.image_model), host in LOCAL
    app = application(service, key=key, local=local, places=arguments.places, max_body=arguments.max_body)
    if key is None and not local:
        print(f"visspec: anyone who can reach {host} can use this server; set {KEY} to a key", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises the signal again when it has finished
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after Ctrl-C
        uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=arguments.grace, server_header=False)
    return 0
