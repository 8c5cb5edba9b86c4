"""`visspec serve`: a model behind OpenAI's HTTP interface, on this machine unless told otherwise."""

import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from visspec.cli.arguments import ModelOptions, load
from visspec.io.options import Positive, number, option

KEY = "VISSPEC_API_KEY"
Port = Annotated[int, number(int, lambda value: 0 <= value < 1 << 16, "a number from 0 to 65535")]


@dataclass(kw_only=True)
class Options(ModelOptions):
    host: str = option("address to listen on", "127.0.0.1")
    port: Port = option("to listen on", 8000)
    image_model: str | None = option("also serve images/generations: included name, folder or hub id", None)
    slots: Positive = option("answers written at once", 8)
    places: Positive = option("requests taken at once, those that wait included", 64)
    max_new_tokens: Positive = option("of an answer that asks for no number", 512)
    max_body: Positive = option("bytes of a request", 20_000_000)
    max_pixels: Positive = option("of a request's images together", 64_000_000)
    prefix_cache: int | None = option(
        "bytes of prompts kept for those that begin alike, such as chats that go on; 0: none (default: 512 MiB)", None
    )
    grace: Positive = option("seconds for running answers after SIGTERM", 60)


def run(arguments: Options) -> int:
    """Serve until SIGTERM or Ctrl-C; what runs is finished then."""
    from visspec.api.sources import need

    if arguments.batch_invariant and arguments.prefix_cache:
        raise ValueError(
            "--prefix-cache: got it with --batch-invariant, which keeps no prompts. Leave one of them out."
        )
    _, _, uvicorn = (need(package, "serve", "serve") for package in ("fastapi", "openai", "uvicorn"))
    from visspec.api.images import ImagePipeline
    from visspec.api.server import LOCAL, Service, application
    from visspec.api.serving import TextWorker
    from visspec.io import included

    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    try:
        socket.create_server((arguments.host, arguments.port), family=family).close()
    except OSError as error:
        raise ValueError(f"--host, --port: can't listen on {arguments.host}, {arguments.port} ({error})") from None
    key, local = os.environ.get(KEY) or None, arguments.host in LOCAL
    fast, processor = load(arguments)
    pipe = None
    if arguments.image_model is not None:
        how: dict[str, Any] = arguments.hardware | {"batch_invariant": arguments.batch_invariant}
        pipe = ImagePipeline.from_pretrained(arguments.image_model, **how)
        pipe.set_progress_bar_config(disable=True)
    sizes = {name: getattr(arguments, name) for name in ("slots", "max_new_tokens", "max_pixels", "prefix_cache")}
    text = TextWorker(arguments.model or included.text_model(), fast, processor, **sizes)
    limits = {"places": arguments.places, "max_body": arguments.max_body}
    app = application(Service(text, pipe, arguments.image_model), key=key, local=local, **limits)
    if key is None and not local:
        print(f"visspec: anybody who reaches {arguments.host} can use this server; {KEY} sets a key", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when all is done
    where = {"host": arguments.host, "port": arguments.port, "timeout_graceful_shutdown": arguments.grace}
    with suppress(KeyboardInterrupt):  # as it does with Ctrl-C
        uvicorn.run(app, **where, server_header=False)
    return 0
