"""`visspec serve` through the official client: answers equal generate's, refusals name the field, rows are freed."""

# ruff: noqa: E402 (what is imported needs the extra)

import base64
import io
import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import get_type_hints

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
openai = pytest.importorskip("openai", reason="the extra `serve` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from openai.types import image_generate_params
from openai.types.chat import completion_create_params

import visspec
from tests import children
from tests.grammars import SCHEMA, json_model, json_processor
from visspec.api import loading
from visspec.api.captions import prepare
from visspec.api.schemas import JsonGrammars
from visspec.api.server.app import Service, application
from visspec.api.server.completions import ChatBody, DrawingBody, refusal
from visspec.api.server.worker import StopTextFilter, TextWorker
from visspec.io import included

SHORT = 12
TEXT = "describe the picture in detail ."


@pytest.fixture(scope="module")
def endless(captioner):
    """The captioner as a model whose answers never end by themselves."""
    model, processor = loading.load(None)
    model.generation_config.eos_token_id = None
    return model, processor


@pytest.fixture(scope="module")
def pictures():
    return included.scenes("shapes").images(6)


def url(image: Image.Image) -> str:
    image.save(buffer := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def asked(text: str, *images: str) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": u}} for u in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class Running:
    """A server in a thread."""

    def __init__(self, loaded, *, pipe=None, drafter="ngram", length=None, grace=20, text=None, **options):
        self.fast, self.processor = visspec.accelerate(loaded[0], drafter, length=length), loaded[1]
        self.text = TextWorker("captioner", self.fast, loaded[1], **{"slots": 4} | (text or {}))
        app = application(Service(self.text, pipe, None if pipe is None else "painter"), **options)
        config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=grace)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive() and not self.text.thread.is_alive()

    def client(self, **options):
        base = {"base_url": f"http://127.0.0.1:{self.port}/v1", "api_key": "none", "max_retries": 0}
        return openai.OpenAI(**base | options)

    def alone(self, image, text=TEXT, **options) -> str:
        inputs = prepare(self.processor, [image], text, self.fast.model)
        tokens = self.fast.run(**inputs, **{"do_sample": False, "max_new_tokens": SHORT} | options).state.tokens[0]
        return self.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def http(self, method: str, path: str, **options):
        return self.client()._client.request(method, f"http://127.0.0.1:{self.port}{path}", **options)


@pytest.fixture(scope="module")
def running(captioner, pipe):
    options = {"length": "fixed", "max_body": 200_000, "text": {"max_pixels": 1_000_000}}
    with Running(captioner, pipe=pipe, **options) as result:  # fixed: a busy machine's clock must not choose no drafts
        yield result


def ask(client, messages, **options):
    return client.chat.completions.create(**{"model": "captioner", "messages": messages, "max_tokens": SHORT} | options)


def streamed(client, messages, **options) -> tuple[str, list]:
    chunks = list(ask(client, messages, stream=True, **options))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_thread(call):
    """Start a call. Returns a function that waits for its result, or raises what it raised."""
    return ThreadPoolExecutor(1).submit(call).result


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_generate(running, pictures):
    client = running.client()
    assert [m.id for m in client.models.list()] == ["captioner", "painter"]
    for image in pictures[:2]:
        result, expected = ask(client, asked(TEXT, url(image))), running.alone(image)
        assert result.choices[0].message.content == expected and result.choices[0].finish_reason == "length"
        assert result.usage.completion_tokens == SHORT and result.usage.total_tokens > SHORT + 36
        told, chunks = streamed(client, asked(TEXT, url(image)), stream_options={"include_usage": True})
        assert told == expected and chunks[-2].choices[0].finish_reason == "length" and len(chunks) > 4
        assert chunks[-1].usage == result.usage and chunks[0].choices[0].delta.role == "assistant"
    details = ask(client, asked(TEXT, url(pictures[0])), max_tokens=60).usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < 60 and details.rejected_prediction_tokens >= 0


def test_each_request_has_its_own_settings(running, pictures):
    client, image = running.client(), pictures[0]
    messages = asked(TEXT, url(image))
    drawn = ask(client, messages, temperature=1.5, seed=3, top_p=0.9).choices[0].message.content
    assert drawn == running.alone(image, do_sample=True, temperature=1.5, seed=3, top_p=0.9, top_k=0)
    full = running.alone(image, max_new_tokens=40)
    stop = " ".join(full.split()[5:7]).rstrip(" .")
    for result in (
        ask(client, messages, stop=stop, max_completion_tokens=40, max_tokens=None).choices[0].message.content,
        streamed(client, messages, stop=["never said", stop], max_tokens=40)[0],
    ):
        assert result == full[: full.index(stop)].rstrip()
    for most in (40, 7):  # at 7 the last token completes the stop text
        ended = ask(client, messages, stop=stop, max_tokens=most)
        assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens == 7
    system = [{"role": "developer", "content": "caption"}, *messages]  # as clients send back an earlier answer
    first = ask(client, system).choices[0].message.model_dump()
    again = ask(client, [*system, first | {"annotations": []}, {"role": "user", "content": "what ?"}])
    assert again.usage.prompt_tokens > ask(client, system).usage.prompt_tokens + SHORT
    assert running.text.prefixes.hits > 0  # an image is read once for all that is asked of it


CUTS = {"top_p": 1.0, "top_k": 0}  # where a temperature is given


@pytest.mark.parametrize("body, options", [
    ({}, {}), ({"temperature": 0, "top_p": 0.5, "top_k": 3}, {"do_sample": False}),
    ({"temperature": 0.3}, CUTS | {"do_sample": True, "temperature": 0.3}),
    ({"temperature": 1, "top_p": 0.5}, CUTS | {"do_sample": True, "temperature": 1.0, "top_p": 0.5}),
    ({"top_p": 0.5}, {"top_p": 0.5}),  # the model's own settings hold beside it
    ({"top_k": 0, "seed": 2}, {"top_k": 0, "seed": 2}),
])  # fmt: skip
def test_settings_are_those_of_generate(body, options):
    given = body | {"model": "m", "messages": asked("x")}
    assert ChatBody.model_validate(given).options == options


def test_choices_have_seeds(running, pictures):
    client, image = running.client(), pictures[0]
    fields = {"n": 5, "seed": 7, "temperature": 1.5, "max_tokens": 20}
    own = {"do_sample": True, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "max_new_tokens": 20}
    want = [running.alone(image, seed=7 + i, **own) for i in range(5)]
    other = lambda i: ask(client, asked("what ?", url(image)), seed=i, temperature=2, n=3)  # noqa: E731
    others = [in_thread(partial(other, i)) for i in range(3)]
    result = ask(client, asked(TEXT, url(image)), **fields)
    assert [choice.message.content for choice in result.choices] == want and len(set(want)) == 5
    _, chunks = streamed(client, asked(TEXT, url(image)), stream_options={"include_usage": True}, **fields)
    choices = [c.choices[0] for c in chunks if c.choices]
    assert ["".join(c.delta.content or "" for c in choices if c.index == i) for i in range(5)] == want
    assert sum(c.finish_reason is not None for c in choices) == 5
    assert chunks[-1].usage.total_tokens == result.usage.total_tokens
    assert all(len(call().choices) == 3 for call in others)
    assert len(ask(client, asked("what ?"), n=16, max_tokens=1).choices) == 16  # more than slots


@settings(max_examples=150)
@given(st.data())
def test_a_text_in_pieces_is_the_text(data):
    """The first token that completes a stop text ends the text before it, however tokens split words and characters."""
    table = ["a", "b", " a", "ab", " ", "\n", b"\xc3", b"\xa9", "ba", "é a", "aab b"]
    raw = [piece if isinstance(piece, bytes) else piece.encode() for piece in table]

    def decode(tokens):
        return b"".join(raw[t] for t in tokens).decode(errors="replace")

    tokens = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=12))
    texts = [decode(tokens[:n]).lstrip() for n in range(1, len(tokens) + 1)]
    full = texts[-1] if texts else ""
    ends = st.tuples(st.integers(0, len(full)), st.integers(1, 5)).map(lambda at: full[at[0] : sum(at)])
    stops = data.draw(st.lists((ends | st.text("abé ", max_size=4)).filter(bool), max_size=3))
    writer, message, left = StopTextFilter(decode, stops), "", list(tokens)
    last = next((n for n, text in enumerate(texts, 1) if any(s in text for s in stops)), None)
    expected = full.rstrip()
    if last is not None:
        cut = texts[last - 1]
        expected = cut[: min(cut.find(s) for s in stops if s in cut)].rstrip()
    while left and not writer.stopped:
        count = data.draw(st.integers(1, 4))
        message, left = message + writer.add(left[:count]), left[count:]
        assert expected.startswith(message)
    message += writer.finish()
    assert message == writer.text == expected and writer.stopped == (last is not None)
    assert writer.tokens == tokens[:last]


def test_images(running, pipe):
    create = running.client().images.generate
    result = create(model="painter", prompt="a red ring", n=2, extra_body={"seed": 5})
    expected = pipe("a red ring", num_images_per_prompt=2, seed=5).images
    for one, other in zip(result.data, expected, strict=True):
        assert Image.open(io.BytesIO(base64.b64decode(one.b64_json))).tobytes() == other.tobytes()
    long = ("prompt", "ring " * 500)
    for name, value in (("size", "3x"), ("size", "24x8"), ("response_format", "url"), ("style", "vivid"), long):
        with pytest.raises(openai.BadRequestError, match=name) as caught:
            create(**{"prompt": "a red ring", name: value})
        assert caught.value.param == name


# --- JSON -------------------------------------------------------------------------------------------------------------


def schema_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "scene", "schema": schema, "strict": True}}


def test_answers_of_a_schema(captioner, monkeypatch):
    pytest.importorskip("xgrammar")
    with Running((json_model(), json_processor())) as result:
        result.text.context = 10_000

        def answer(schema=None, **options):
            options |= {} if schema is None else {"response_format": schema_format(schema)}
            return ask(result.client(), asked("x"), **{"max_tokens": None} | options).choices[0]

        jsonschema.validate(json.loads(answer(SCHEMA).message.content), SCHEMA)
        cut = answer(response_format={"type": "json_object"}, max_tokens=3)
        assert cut.finish_reason == "length" and cut.message.content.startswith("{")
        plain = answer(max_tokens=3).message.content
        assert answer(response_format={"type": "text"}, max_tokens=3).message.content == plain
        with pytest.raises(openai.BadRequestError, match="response_format: This is not a JSON schema"):
            answer({"type": "nonsense"})
        monkeypatch.setattr(JsonGrammars, "explain", lambda self, text, schema: "'a' is missing")
        told = {"stream": True, "max_tokens": None, "response_format": schema_format(SCHEMA)}
        for call in (lambda: answer(SCHEMA), lambda: list(ask(result.client(), asked("x"), **told))):
            with pytest.raises(openai.APIError, match=r"the answer does not fit the schema \('a' is missing\)"):
                call()
        assert answer(SCHEMA, max_tokens=3).finish_reason == "length"  # nobody expects a whole object


@pytest.mark.parametrize("schema, broken", [
    ({"type": "string", "pattern": "^(?!a)[a-z]+$"}, '"ab"'), ({"type": "integer", "not": {"const": 1}}, "1"),
    ({"type": "number", "multipleOf": 0.5}, "2.7"),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 3}]}, "4"),
    ({"type": "object", "required": ["a"], "properties": {"b": {}}}, '{"b": 1}'),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
])  # fmt: skip
def test_answers_validated_by_schema(schema, broken):
    """Each is a schema whose grammar allows what the schema does not."""
    xgrammar = pytest.importorskip("xgrammar")
    grammars = JsonGrammars(json_processor().tokenizer, json_model(), "schema")
    assert grammars.options(schema) and grammars.explain(broken, schema)
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    assert xgrammar.testing._is_grammar_accept_string(grammar, broken)


# --- what is refused --------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}
DETAIL = {"type": "image_url", "image_url": {"url": "", "detail": "lo"}}
REFUSED = [  # a body, and the argument that the error names
    ({"messages": []}, "messages"), ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 7}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"messages": [USER | {"tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [USER | {"content": [DETAIL]}]}, "messages[0].content[0].image_url.detail"),
    ({"temperature": True}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"max_tokens": 1.5}, "max_tokens"), ({"seed": 2**62 + 1}, "seed"), ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"), ({"stream": "yes"}, "stream"), ({"logprobs": True}, "logprobs"),
    ({"stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"a\nb": 1}, "a\nb"),
]  # fmt: skip


@pytest.mark.parametrize("body, name", REFUSED)
def test_what_a_body_may_not_have(body, name):
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"model": "m", "messages": [USER]} | body)
    error = caught.value.errors()[0]
    result = refusal(error | {"loc": ("body", *error["loc"])})  # as FastAPI has it
    assert result.param == name and str(result).startswith(f"{name}: ") and result.status == 400


MESSAGES = [  # and what is found when they are read
    (asked("x", "https://example.com/a.png"), "send a data URL .* Nothing is fetched"),
    (asked("x", "file:///etc/passwd"), "send a data URL"),
    (asked("x", "data:image/svg+xml;base64,AAAA"), "send a data URL"),
    (asked("x", "data:image/png;base64,A?"), "base64 of an image cannot be read"),
    (asked("x", "data:image/png;base64,AAAA"), "is not a readable PNG"),
    (asked("x", url(Image.new("L", (1001, 1000)))), "more than the limit of 1000000"),
    (asked("x", *[url(Image.new("L", (600, 1000)))] * 2), "the images have 1200000 pixels in total, more than 1000000"),
    (asked("x " * 2000), "exceed the model's context, 1024"),
    (asked("<image> <image> what ?"), "the model's processor rejects them"),
]


@pytest.mark.parametrize("messages, words", MESSAGES)
def test_messages_that_can_not_be_read(running, messages, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(running.client(), messages)
    assert caught.value.body["type"] == "invalid_request_error" and caught.value.param == "messages"


def test_client_fields(running):
    client, chat = running.client(), completion_create_params.CompletionCreateParamsStreaming
    for kind, body, create, good in (
        (chat, ChatBody, client.chat.completions.create, {"model": "captioner", "messages": asked("what ?")}),
        (image_generate_params.ImageGenerateParamsStreaming, DrawingBody, client.images.generate, {"prompt": "a ring"}),
    ):
        others = get_type_hints(kind).keys() - body.model_fields.keys()
        assert len(others) > 5 and create(**good, extra_body=dict.fromkeys(others))  # null asks for nothing
        zeros = dict.fromkeys(("frequency_penalty", "presence_penalty"), 0) if body is ChatBody else {}
        assert create(**good, user="u", **zeros)
        for name in sorted(others):
            with pytest.raises(openai.BadRequestError, match="this server does not support this argument") as caught:
                create(**good, extra_body={name: "x"})
            assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")
        with pytest.raises(openai.BadRequestError) as caught:
            create(**good | {"extra_body": {"model": None}})
        assert caught.value.param == "model"


def test_strangers_and_strange_bodies(running, captioner):
    with pytest.raises(openai.NotFoundError, match="model: got 'gpt', this server has 'captioner'"):
        ask(running.client(), asked("x"), model="gpt")
    path, kind = "/v1/chat/completions", {"content-type": "application/json"}
    for options, status, words in (
        ({"content": b"{", "headers": kind}, 400, "body"),
        ({"content": b"[1]", "headers": kind}, 400, "body: "),
        ({"content": b"[" * 100_000, "headers": kind}, 400, "error parsing the body"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 400, "body: "),
        ({"content": b'{"\\ud800": 1}', "headers": kind}, 400, "body"),
        ({"json": {"x": "x" * 300_000}}, 413, "more than 200000 bytes"),
        ({"content": (b"x" for _ in range(3)), "headers": kind}, 411, "body: got no content-length"),
    ):
        answer = running.http("POST", path, **options)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
    assert running.http("GET", "/nowhere").json()["error"]["message"] == "Not Found"
    assert running.http("GET", path).status_code == 405
    for host, status in (("localhost", 200), ("[::1]:8000", 200), ("evil.example", 400), ("localhost.evil.com", 400)):
        assert running.http("GET", "/v1/models", headers={"host": host}).status_code == status, host
    with Running(captioner, key="schlüssel") as guarded:
        with pytest.raises(openai.AuthenticationError, match="The API key is missing or wrong"):
            guarded.client().models.list()
        assert guarded.http("GET", "/health").status_code == 200
        for scheme, status in (("bearer ", 200), ("BEARER  ", 200), ("", 401), ("Basic ", 401), ("Bearer", 401)):
            given = {"authorization": scheme.encode() + "schlüssel".encode()}
            assert guarded.http("GET", "/v1/models", headers=given).status_code == status
        given = {"authorization": b"bearer " + "schlüssel".encode()}
        answer = guarded.http("POST", "/v1/images/generations", json={"prompt": "x"}, headers=given)
        assert answer.status_code == 404 and "was started without --image-model" in answer.text


# --- many clients, faults and the end ---------------------------------------------------------------------------------


def test_clients_that_leave_and_a_full_queue(endless, pictures):
    messages = asked(TEXT, url(pictures[0]))
    with Running(endless, text={"slots": 1}, places=2) as running:
        first = ask(running.client(), messages, stream=True, max_tokens=900)
        assert any(chunk.choices[0].delta.content for chunk in first)  # it runs
        second = in_thread(lambda: ask(running.client(), messages))
        until(lambda: running.text.queue.qsize() == 1)
        with pytest.raises(openai.RateLimitError, match="works on 2 requests") as caught:
            ask(running.client(), messages)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        (row,) = running.text.running
        first.close()
        assert second().usage.completion_tokens == SHORT and len(row.writer.tokens) < 500
        with pytest.raises(openai.APITimeoutError):  # a client that asked for no stream
            ask(running.client(timeout=0.3), messages, max_tokens=900)
        assert ask(running.client(), messages).usage.completion_tokens == SHORT
        until(lambda: not running.text.running)


def test_failed_pass_fails_its_rows(captioner, pictures, monkeypatch):
    with Running(captioner) as running:
        target, faults = running.fast.target, [RuntimeError("made up")]
        verify = target.verify

        def failing(state, draft):
            if faults:
                raise faults.pop()
            return verify(state, draft)

        monkeypatch.setattr(target, "verify", failing)
        messages = asked(TEXT, url(pictures[0]))
        with pytest.raises(openai.InternalServerError, match="RuntimeError: made up"):
            ask(running.client(), messages)
        faults.append(RuntimeError("made up"))
        with pytest.raises(openai.APIError, match="RuntimeError: made up"):  # the status was sent already
            list(ask(running.client(), messages, stream=True))
        assert ask(running.client(), messages).usage.completion_tokens == SHORT


@pytest.mark.parametrize("grace", [20, 1])
def test_graceful_stop(grace, endless, pictures, capfd):
    messages = asked(TEXT, url(pictures[0]))
    with Running(endless, text={"slots": 1}, grace=grace) as running:
        long = {"max_tokens": 60} if grace > 1 else {"max_tokens": 940, "temperature": 1, "seed": 0}
        first = iter(ask(running.client(), messages, stream=True, **long))
        next(first)
        second = in_thread(lambda: ask(running.client(), messages))
        until(lambda: running.text.queue.qsize() == 1)
        began = time.monotonic()
        running.server.handle_exit(signal.SIGTERM, None)
        if grace > 1:
            until(lambda: not running.server.servers or not running.server.servers[0].is_serving())
            with pytest.raises(openai.APIConnectionError):
                ask(running.client(), messages, max_tokens=1)
            *_, last = first
            assert last.choices[0].finish_reason == "length" and second().usage.completion_tokens == SHORT
        else:
            with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
                second()
            with pytest.raises(openai.APIError):
                list(first)
        running.thread.join(20)
        assert not running.thread.is_alive() and time.monotonic() - began < 15
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("clients, requests", [(6, 12), pytest.param(16, 200, marks=pytest.mark.nightly)])
def test_many_clients_at_once(clients, requests, captioner, pictures):
    """With requests of their own at once, one cut off in the middle: all right, none mixed up."""
    wrong, done, kinds = [], [], []

    def work(i: int) -> None:
        client, (messages, most, expected) = running.client(max_retries=20), kinds[i % len(kinds)]
        if i % 2:
            result = streamed(client, messages, max_tokens=most)[0]
        else:
            result = ask(client, messages, max_tokens=most).choices[0].message.content
        (done if result == expected else wrong).append(i)

    with Running(captioner, text={"slots": clients // 2}, places=clients - 1, drafter="vispec") as running:
        for i, picture in enumerate(pictures[: clients // 3]):
            for text, most in ((TEXT, 20 + 7 * i), ("how many shapes are there ?", 40)):
                kinds.append((asked(text, url(picture)), most, running.alone(picture, text, max_new_tokens=most)))
        pool = ThreadPoolExecutor(clients)
        calls = [pool.submit(work, i) for i in range(requests)]
        until(lambda: len(done) > requests // 4, 300)
        cut = ask(running.client(max_retries=20), kinds[0][0], stream=True, max_tokens=200, temperature=1.0)
        next(iter(cut))
        cut.close()
        for call in calls:
            call.result(300)
        assert not wrong and sorted(done) == list(range(requests))
        until(lambda: not running.text.running)


@pytest.mark.slow
def test_sigterm_exit_code(captioner, pictures, tmp_path):
    """`visspec serve` in a process of its own."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port = result.getsockname()[1]
    argv = ["serve", "--port", str(port), "--slots", "2", "--drafter", "none"]
    message, process = tmp_path / "said", children.command(argv, tmp_path / "said")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def answers():
        assert process.is_alive(), message.read_text()
        with suppress(openai.APIConnectionError):
            return client.models.list().data

    try:
        until(answers, 120)
        first = iter(ask(client, asked(TEXT, url(pictures[0])), model=answers()[0].id, stream=True))
        next(first)
        process.terminate()
        *_, last = first
        assert last.choices[0].finish_reason == "length"
        process.join(20)
        assert process.exitcode == 0 and not re.search("Traceback|Error", message.read_text())
    finally:
        process.kill()
        process.join()
