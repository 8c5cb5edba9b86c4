"""`visspec serve`: the official client is the test. Answers are those of generate, whoever else asks; what can't be
served is one sentence; clients that leave free their rows; a server that stops finishes what it has.
"""

# ruff: noqa: E402 (what is imported needs the extra)

import base64
import copy
import gc
import io
import json
import re
import signal
import socket
import sys
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPImageProcessor, CLIPImageProcessorPil

fastapi = pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
openai = pytest.importorskip("openai", reason="the client `openai` is not installed (extra `test`)")

import visspec
from tests import children
from tests.grammars import SCHEMA, json_model, json_processor
from visspec.api import chat_inputs, completions, loading
from visspec.api.answers import QueuedRequest, StopTextFilter
from visspec.api.captions import prepare
from visspec.api.completions import RequestError, RequestLimits
from visspec.api.server import Server, Service
from visspec.api.serving import ImageWorker, QueueWorker, RequestQueue, ServerMetrics, TextWorker
from visspec.toys.world.captions import questions
from visspec.toys.world.render import to_image
from visspec.toys.world.scene import held_out_scenes

SHORT = 12


@pytest.fixture(scope="module")
def endless(captioner):
    """The captioner as a model whose answers never end by themselves."""
    model, processor = loading.load(None)
    model.generation_config.eos_token_id = None
    return model, processor


def url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def asked(text: str, *images: str) -> list[dict]:
    pictures = [{"type": "image_url", "image_url": {"url": u}} for u in images]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


class Running:
    """A server in a thread."""

    def __init__(
        self, loaded, *, pipe=None, slots=4, places=32, key=None, drafter="ngram", grace=20, bytes=10**8,
        host="127.0.0.1", length=None, **limits
    ):  # fmt: skip
        self.fast = visspec.accelerate(loaded[0], drafter, length=length)
        self.processor, meters = loaded[1], ServerMetrics()
        limits = RequestLimits(**{"context": 1024} | limits)
        self.writing = TextWorker("captioner", self.fast, loaded[1], meters, slots, limits)
        painting = None if pipe is None else ImageWorker("painter", pipe, meters)
        desk = RequestQueue(places, meters, limits.at_once, bytes)
        self.service = Service(desk, self.writing, painting, key, local=True)
        self.server = Server(self.service, host, 0, grace, log_level="warning")
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def client(self, **options):
        return openai.OpenAI(
            **{"base_url": f"http://127.0.0.1:{self.port}/v1", "api_key": "none", "max_retries": 0} | options
        )

    def alone(self, image, text, **options) -> str:
        inputs = prepare(self.processor, [image], text, self.fast.model)
        tokens = self.fast.run(**inputs, **{"do_sample": False, "max_new_tokens": SHORT} | options).state.tokens[0]
        return self.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def get(self, path: str, **headers):
        return self.client()._client.get(f"http://127.0.0.1:{self.port}{path}", headers=headers)

    def raw(self, *lines: bytes, body: bytes = b"") -> socket.socket:
        """A connection on which a request was sent, byte for byte."""
        found = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        found.sendall(b"\r\n".join([*lines, b"", body]))
        return found

    def post(self, path: str, **options):
        return self.client()._client.post(f"http://127.0.0.1:{self.port}{path}", **options)


@pytest.fixture(scope="module")
def running(captioner, pipe):
    with Running(captioner, pipe=pipe, pixels=1_000_000, body=200_000) as found:
        yield found


@pytest.fixture(scope="module")
def scenes():
    return held_out_scenes(6)


def ask(client, messages, **options):
    return client.chat.completions.create(**{"model": "captioner", "messages": messages, "max_tokens": SHORT} | options)


def streamed(client, messages, **options) -> tuple[str, list]:
    chunks = list(ask(client, messages, stream=True, **options))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def test_answers_are_those_of_generate_streamed_and_not(running, scenes):
    client = running.client()
    assert [m.id for m in client.models.list()] == ["captioner", "painter"]
    for scene in scenes[:2]:
        image, text = to_image(scene), "describe the picture in detail ."
        found = ask(client, asked(text, url(image)))
        expected = running.alone(image, text)
        assert found.choices[0].message.content == expected and found.choices[0].finish_reason == "length"
        assert found.usage.completion_tokens == SHORT and found.usage.total_tokens > SHORT + 36
        told, chunks = streamed(client, asked(text, url(image)), stream_options={"include_usage": True})
        assert told == expected and chunks[-2].choices[0].finish_reason == "length" and len(chunks) > 4
        assert (
            chunks[-1].usage.total_tokens == found.usage.total_tokens and chunks[0].choices[0].delta.role == "assistant"
        )


def test_each_request_has_its_own_settings(running, scenes):
    client, image, text = running.client(), to_image(scenes[0]), "describe the picture in detail ."
    messages = asked(text, url(image))
    drawn = ask(client, messages, temperature=1.5, seed=3, top_p=0.9)
    assert drawn.choices[0].message.content == running.alone(
        image, text, do_sample=True, temperature=1.5, seed=3, top_p=0.9, top_k=0
    )
    full = running.alone(image, text, max_new_tokens=40)
    words = full.split()
    stop = " ".join(words[5:7]).rstrip(" .")
    for found in (
        ask(client, messages, stop=stop, max_completion_tokens=40, max_tokens=None).choices[0].message.content,
        streamed(client, messages, stop=["never said", stop], max_tokens=40)[0],
    ):
        assert found == full[: full.index(stop)].rstrip()
    for most in (40, 7):  # at 7 the last token completes the stop text
        ended = ask(client, messages, stop=stop, max_tokens=most)
        assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens == 7
    question, answer = questions(scenes[0])[0]
    said = ask(client, asked(question, url(image)), max_tokens=None).choices[0].message.content
    assert said == answer.replace(" .", ".")
    dialogue = [*asked(question, url(image)), {"role": "assistant", "content": answer}, *asked("what else ?")]
    assert ask(client, dialogue).usage.prompt_tokens > ask(client, asked(question, url(image))).usage.prompt_tokens


def test_images(running, pipe):
    found = running.client().images.generate(model="painter", prompt="a red ring", n=2, extra_body={"seed": 5})
    expected = pipe("a red ring", num_images_per_prompt=2, seed=5).images
    for one, other in zip(found.data, expected, strict=True):
        assert Image.open(io.BytesIO(base64.b64decode(one.b64_json))).tobytes() == other.tobytes()
    with pytest.raises(openai.BadRequestError, match="size: got '3x'"):
        running.client().images.generate(model="painter", prompt="a red ring", size="3x")
    with pytest.raises(openai.BadRequestError, match="response_format: got 'url', expected 'b64_json'"):
        running.client().images.generate(model="painter", prompt="a red ring", response_format="url")


def test_cuts_hold_where_the_model_samples_by_default(captioner, scenes):
    model, processor = loading.load(None)
    model.generation_config.update(do_sample=True, temperature=3.0)
    image, text = to_image(scenes[0]), "describe the picture in detail ."
    with Running((model, processor)) as running:
        plain = running.alone(image, text, do_sample=True, seed=3)
        for cut in ({"top_p": 0.3}, {"top_k": 2}):
            found = ask(running.client(), asked(text, url(image)), seed=3, extra_body=cut).choices[0].message.content
            assert found == running.alone(image, text, do_sample=True, seed=3, **cut) != plain


def test_settings_of_a_request_are_those_of_generate():
    for body, options in (
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, {"do_sample": False}),
        ({"temperature": 0.3}, {"do_sample": True, "temperature": 0.3, "top_p": 1.0, "top_k": 0}),
        ({"temperature": 1, "top_p": 0.5}, {"do_sample": True, "temperature": 1.0, "top_p": 0.5, "top_k": 0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 0, "seed": 2}, {"top_k": 0, "seed": 2}),
    ):
        assert completions.chat(body | {"messages": asked("x")}, RequestLimits()).options == options
    both = {"messages": asked("x"), "max_tokens": 7, "max_completion_tokens": 5}
    assert completions.chat(both, RequestLimits()).most == 5


def test_answers_of_a_schema(captioner):
    pytest.importorskip("xgrammar")
    described = {"type": "json_schema", "json_schema": {"name": "scene", "schema": SCHEMA, "strict": True}}
    with Running((json_model(), json_processor()), context=None) as found:

        def answer(**options):
            made = found.client().chat.completions.create(model="captioner", messages=asked("x"), **options)
            return made.choices[0]

        jsonschema.validate(json.loads(answer(response_format=described).message.content), SCHEMA)
        other = answer(response_format=described, presence_penalty=1.5, logit_bias={"5": 100})
        jsonschema.validate(json.loads(other.message.content), SCHEMA)
        cut = answer(response_format={"type": "json_object"}, max_tokens=3)
        assert cut.finish_reason == "length" and cut.message.content.startswith("{")
        assert (
            answer(response_format={"type": "text"}, max_tokens=3).message.content
            == answer(max_tokens=3).message.content
        )
        described["json_schema"]["schema"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError, match="response_format: got what can't be a grammar"):
            answer(response_format=described)


BAD = [
    ({"messages": asked("x", "https://example.com/a.png")}, "expected a data URL .*fetches nothing"),
    ({"messages": asked("x", "file:///etc/passwd")}, "expected a data URL"),
    ({"messages": asked("x", "data:image/svg+xml;base64,AAAA")}, "expected base64 of image/png"),
    ({"messages": asked("x", "data:image/png;base64,A?")}, "base64 that can't be read"),
    ({"messages": asked("x", "data:image/png;base64,AAAA")}, "is not a readable PNG"),
    ({"messages": asked("x", "BIG")}, "more than the limit of 1000000"),
    ({"messages": asked("x " * 2000)}, "expected at most 1024, the model's context"),
    ({"messages": []}, "messages: got .*, expected a list of messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role: got 'tool'"),
    ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].content: got 7"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "got 'input_audio'"),
    ({"messages": asked("<image> <image> what ?")}, "."),
    ({"temperature": -1}, "temperature: got -1"),
    ({"temperature": True}, "temperature: got True"),
    ({"top_p": 0}, "top_p: got 0"),
    ({"max_tokens": 0}, "max_tokens: got 0"),
    ({"seed": -1}, "seed: got -1"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: got"),
    ({"stop": ["a"] * 5}, "stop: got"),
    ({"stop": [""]}, "stop: got"),
    ({"extra_body": {"repetition_penalty": 1.2}}, "repetition_penalty: got 1.2, expected none"),
    ({"stream_options": {"include_usge": True}}, "stream_options: got"),
    ({"messages": [{"role": "user", "content": "x", "name": "eve"}]}, r"messages\[0\].name: got 'eve'"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, r"messages\[0\].tool_calls: got"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "", "detail": "low"}}]}]},
        r"messages\[0\].content\[0\].image_url.detail: got 'low'",
    ),
]


@pytest.mark.parametrize("options, words", BAD)
def test_what_can_not_be_served_is_a_sentence(running, options, words):
    if "BIG" in str(options):
        options = {"messages": asked("x", url(Image.new("L", (1001, 1000))))}
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(running.client(), **{"messages": asked("hello .")} | options)
    assert caught.value.body["type"] == "invalid_request_error" and "\n" not in caught.value.body["message"]


def test_strangers_and_strange_bodies(running, captioner):
    client = running.client()
    with pytest.raises(openai.NotFoundError, match="model: got 'gpt', expected 'captioner'"):
        ask(client, asked("x"), model="gpt")
    with pytest.raises(openai.APIStatusError, match="more than 200000 bytes") as caught:
        ask(client, asked("x" * 300_000))
    assert caught.value.status_code == 413
    path = "/v1/chat/completions"
    for options, status, words in (
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "got no JSON"),
        ({"content": b"[1]", "headers": {"content-type": "application/json"}}, 400, "got list"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "got text/plain"),
        ({"json": {}, "headers": {"host": "evil.example"}}, 403, "host: got evil.example"),
    ):
        answer = running.post(path, **options)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
    big = running.post(path, content=(b"x" * 1000 for _ in range(300)), headers={"content-type": "application/json"})
    assert big.status_code == 413  # its length was not told
    assert running.get("/nowhere").json()["error"]["message"].startswith("path: got GET /nowhere")
    with Running(captioner, key="secret") as guarded:
        with pytest.raises(openai.AuthenticationError, match="key: got another one"):
            guarded.client().models.list()
        assert guarded.get("/metrics").status_code == 401 and guarded.get("/health").status_code == 200
        assert [m.id for m in guarded.client(api_key="secret").models.list()] == ["captioner"]
        with pytest.raises(openai.NotFoundError, match="started with --image-model"):
            guarded.client(api_key="secret").images.generate(prompt="x")


PATH = b"POST /v1/chat/completions HTTP/1.1"
JSON = b"content-type: application/json"


def test_it_listens_where_it_is_told(captioner):
    with Running(captioner, host="127.0.0.2") as running:
        assert running.server.servers[0].sockets[0].getsockname()[0] == "127.0.0.2"


def test_hosts_keys_and_types_are_compared_as_they_are_sent(captioner, monkeypatch):
    with Running(captioner, key="schlüssel") as running:
        key = b"authorization: Bearer " + "schlüssel".encode()

        def status(*lines: bytes, path: bytes = b"GET /v1/models HTTP/1.1", body: bytes = b"") -> int:
            with running.raw(path, *lines, b"connection: close", body=body) as found:
                return int(found.recv(100).split()[1])

        for host in (b"localhost", b"LocalHost:80", b"127.0.0.1:", b"[::1]:8000"):
            assert status(b"host: " + host, key) == 200
        for host in (b"a{b.evil.com", b"", b"\xe4.evil.com", b"localhost.evil.com", b"evil.com:80",
                     b"localhost:80@evil", b"[::1", b"127.0.0.1 evil", b"::1", b"localhost:x"):  # fmt: skip
            assert status(b"host: " + host, key) == 403, host
        assert status(key, path=b"GET /v1/models HTTP/1.0") == 403
        for scheme, found in ((b"bearer ", 200), (b"BEARER  ", 200), (b"", 401), (b"Basic ", 401), (b"Bearer", 401)):
            assert status(b"host: localhost", key.replace(b"Bearer ", scheme)) == found
        kind, body = b"content-type: Application/JSON; charset=utf-8", b'{"messages": 7}'
        lines = (b"host: localhost", key, kind, b"content-length: %d" % len(body))
        assert status(*lines, path=PATH, body=body) == 400
        small = url(Image.new("RGB", (9, 7))).replace("data:image/png;base64", "DATA:image/PNG;BASE64")
        assert completions.picture(small, "x", 100).pixels == 63


def test_models_by_their_names(running, monkeypatch):
    found = running.client().models.retrieve("captioner")
    assert found == running.client().models.list().data[0]
    monkeypatch.setattr(running.writing, "name", "/models/org/name")  # a folder
    assert running.client().models.retrieve("/models/org/name").id == "/models/org/name"
    with pytest.raises(
        openai.NotFoundError, match="model: got 'x', expected '/models/org/name' or 'painter'"
    ) as caught:
        running.client().models.retrieve("x")
    assert caught.value.code == "model_not_found"


def test_bodies_that_are_not_complete_take_no_place(captioner, monkeypatch):
    with Running(captioner, places=1, bytes=2000) as running:
        lines = (PATH, b"host: localhost", JSON)
        half = [running.raw(*lines, b"content-length: 500", body=b"x" * 300) for _ in range(3)]
        until(lambda: running.service.desk.bytes == 900)
        assert ask(running.client(), asked("x")).choices
        with pytest.raises(openai.RateLimitError, match="bodies of more than 2000 bytes together"):
            ask(running.client(), asked("x " * 1000))
        for one in half:
            one.close()
        until(lambda: running.service.desk.bytes == 0)
        monkeypatch.setattr("visspec.api.server.READING", 0.1)
        with running.raw(*lines, b"content-length: 500", body=b"{") as slow:
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def random_image(*size):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))


@pytest.mark.parametrize(
    "size", [(97, 150, 3), (3, 50, 3), (50, 3, 3), (1, 1, 3), (40, 60), (40, 60, 4), (400, 301, 3)]
)
def test_a_prompt_is_the_same_of_images_and_of_tensors(captioner, size):
    """Bit for bit, whatever the image's size and mode."""
    body = {"messages": asked("describe it .", *[url(random_image(*size))] * 2)}

    def of(tensors):
        return chat_inputs.prompt_of(captioner[1], completions.chat(body, RequestLimits()), nullcontext(), tensors)

    assert chat_inputs.takes_tensors(captioner[1])
    want, got = of(False), of(True)
    assert want.keys() == got.keys() and len(want["pixel_values"]) == 2
    for name in want:
        assert torch.equal(want[name], got[name])


def test_a_processor_is_given_images_where_tensors_make_a_difference(captioner):
    processor = captioner[1]

    def with_images(change, kind=CLIPImageProcessor):
        class Particular(kind):
            def preprocess(self, images, *args, **kwargs):
                return super().preprocess(change(images), *args, **kwargs)

        other = copy.copy(processor)
        other.image_processor = Particular(size={"shortest_edge": 96}, crop_size={"height": 96, "width": 96})
        return other

    def brighter(images):
        return [[i // 2 if isinstance(i, torch.Tensor) else i for i in row] for row in images]

    def opened(images):
        return [[i.convert("RGB") for i in row] for row in images]

    assert chat_inputs.takes_tensors(with_images(lambda images: images))
    assert not chat_inputs.takes_tensors(with_images(brighter))
    assert not chat_inputs.takes_tensors(with_images(opened))
    assert not chat_inputs.takes_tensors(with_images(lambda images: images, CLIPImageProcessorPil))
    assert not chat_inputs.takes_tensors(processor.tokenizer)


@pytest.mark.parametrize("tensors", [False, True])
def test_images_are_decoded_when_there_is_room_and_let_go(captioner, monkeypatch, tensors):
    """At most one request's pixels are decoded at once here, and none is left, without the garbage collector."""
    monkeypatch.setattr(chat_inputs, "takes_tensors", lambda processor: tensors)
    alive, most = weakref.WeakSet(), []

    class Counted(Image.Image):
        __hash__ = object.__hash__

    def counted(*given):
        image = read(*given)
        image.__class__ = Counted
        alive.add(image)
        most.append(len(alive))
        return image

    read = chat_inputs.read_image
    monkeypatch.setattr(chat_inputs, "read_image", counted)
    pictures = [url(Image.new("RGB", (200, 200), (20 * i, 0, 0))) for i in range(3)]
    with Running(captioner, slots=2, at_once=130_000) as running:
        with pytest.raises(openai.BadRequestError, match="images of 160000 pixels together, expected at most 130000"):
            ask(running.client(), asked("x", *pictures, pictures[0]))
        gc.collect()
        gc.disable()
        try:
            calls = [in_thread(lambda: ask(running.client(), asked("what ?", *pictures))) for _ in range(6)]
            broken = in_thread(lambda: ask(running.client(), asked("<image> what ?", *pictures)))
            assert {call().usage.completion_tokens for call in calls} <= set(range(1, SHORT + 1))
            with pytest.raises(openai.BadRequestError, match="processor can't read"):
                broken()
            assert len(most) == 21 and max(most) == (1 if tensors else 3) and not alive
        finally:
            gc.enable()
        until(lambda: running.service.desk.pixels == running.service.desk.taken == 0)


NAMES = ("messages", "stop", "stream", "stream_options", "seed", "n", "tools", "size", "prompt", "temperature", "top_p")
NAMES += ("logit_bias", "logprobs", "top_logprobs", "presence_penalty", "tool_choice")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("role", "content", "type", "text", "image_url", "url", "tool_calls", "5")),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
CONTENT = st.text(max_size=3) | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(("text", "image_url", 7))}), max_size=2
)
GOOD = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT}), min_size=1, max_size=2)


@given(st.dictionaries(st.sampled_from(NAMES), values), st.none() | GOOD)
def test_any_body_is_read_or_refused(body, messages):
    body |= {} if messages is None else {"messages": messages, "prompt": "a red ring"}
    for read in (
        lambda: completions.chat(body, RequestLimits(vocab=9, no_tools="")),
        lambda: completions.drawing(body),
    ):
        try:
            read()
        except RequestError as error:
            assert error.status == 400 and "expected" in str(error)
    neutral = {"n": 1, "presence_penalty": 0.0, "tools": [], "logprobs": False, "stream_options": None, "stop": None}
    assert completions.chat(neutral | {"messages": asked("x")}, RequestLimits()).messages


def measured(running) -> dict[str, float]:
    lines = running.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_metrics(captioner, scenes):
    with Running(captioner, length="fixed") as running:  # a busy machine's clock must not choose to draft nothing
        streamed(running.client(), asked("describe the picture in detail .", url(to_image(scenes[0]))), max_tokens=60)
        with pytest.raises(openai.BadRequestError):
            ask(running.client(), [])
        until(lambda: measured(running).get('visspec_requests_total{kind="chat",outcome="ok"}') == 1)
        found = measured(running)
    assert found['visspec_requests_total{kind="chat",outcome="refused"}'] == 1
    assert found["visspec_tokens_total"] == 60 and found["visspec_tau"] > 1 and 0 < found["visspec_acceptance"] <= 1
    assert found["visspec_queue"] == found["visspec_running"] == found["visspec_drift_per_token"] == 0
    assert found['visspec_reached_total{depth="1"}'] >= found['visspec_accepted_total{depth="1"}'] > 0


def test_an_image_is_read_once_for_all_that_is_asked_of_it(captioner, scenes):
    """And a chat that goes on is read from its last turn on."""
    picture = url(to_image(scenes[0]))
    with Running(captioner) as running:
        chat = asked("how many shapes are there ?", picture)
        for text in ("what is the ground like ?", "what is at the top edge ?"):
            answer = ask(running.client(), chat, max_tokens=8).choices[0].message.content
            chat += [{"role": "assistant", "content": answer}, *asked(text)]
        ask(running.client(), asked("what is at the top edge ?", picture), max_tokens=8)
        found = measured(running)
    assert (found["visspec_prefix_hits_total"], found["visspec_prefix_misses_total"]) == (2, 1)
    assert found["visspec_prefix_tokens_total"] > 2 * 36 and found["visspec_prefix_bytes"] > 0


def in_thread(call):
    """Start a call. Returns a function that waits for its result, or raises what it raised."""
    found = {}

    def work():
        try:
            found["value"] = call()
        except Exception as error:
            found["error"] = error

    thread = threading.Thread(target=work)
    thread.start()

    def result():
        thread.join(60)
        if "error" in found:
            raise found["error"]
        return found["value"]

    return result


def test_a_client_that_leaves_frees_its_row_and_a_full_queue_says_so(endless, scenes):
    messages = asked("describe the picture in detail .", url(to_image(scenes[0])))
    with Running(endless, slots=1, places=2) as running:
        first = ask(running.client(), messages, stream=True, max_tokens=900)
        assert any(chunk.choices[0].delta.content for chunk in first)  # it runs
        second = in_thread(lambda: ask(running.client(), messages))
        until(lambda: measured(running)["visspec_queue"] == 1)
        with pytest.raises(openai.RateLimitError, match="expected at most 2 at once") as caught:
            ask(running.client(), messages)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        first.close()
        assert second().usage.completion_tokens == SHORT
        until(lambda: measured(running).get('visspec_requests_total{kind="chat",outcome="gone"}') == 1)
        assert measured(running)["visspec_tokens_total"] < 500
        plain = running.client(timeout=0.3, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            ask(plain, messages, max_tokens=900)  # a client that asked for no stream
        assert ask(running.client(), messages).usage.completion_tokens == SHORT


def test_a_failed_pass_costs_the_rows_that_ran(captioner, scenes, monkeypatch):
    with Running(captioner) as running:
        target, faults = running.fast.target, [RuntimeError("made up")]
        verify = target.verify

        def failing(state, draft):
            if faults:
                raise faults.pop()
            return verify(state, draft)

        monkeypatch.setattr(target, "verify", failing)
        messages = asked("describe the picture in detail .", url(to_image(scenes[0])))
        with pytest.raises(openai.InternalServerError, match="got RuntimeError in a pass"):
            ask(running.client(), messages)
        faults.append(RuntimeError("made up"))
        verify_first = iter(ask(running.client(), messages, stream=True))
        with pytest.raises(openai.APIError, match="got RuntimeError in a pass"):  # the status was sent already
            list(verify_first)
        assert ask(running.client(), messages).usage.completion_tokens == SHORT


def test_a_server_that_stops_finishes_what_it_has_and_takes_no_more(endless, scenes):
    messages = asked("describe the picture in detail .", url(to_image(scenes[0])))
    with Running(endless, slots=1) as running:
        first = iter(ask(running.client(), messages, stream=True, max_tokens=60))
        next(first)
        second = in_thread(lambda: ask(running.client(), messages))
        until(lambda: measured(running)["visspec_queue"] == 1)
        running.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            for _ in range(100):
                ask(running.client(), messages, max_tokens=1)
        *_, last = first
        assert last.choices[0].finish_reason == "length" and second().usage.completion_tokens == SHORT
        running.thread.join(20)
        assert not running.thread.is_alive() and not running.writing.thread.is_alive()


def test_answers_that_outlast_the_grace_are_cut(endless, scenes, capfd):
    messages = asked("describe the picture in detail .", url(to_image(scenes[0])))
    with Running(endless, slots=1, grace=1) as running:
        first = iter(ask(running.client(), messages, stream=True, max_tokens=980 - 40, temperature=1, seed=0))
        next(first)
        second = in_thread(lambda: ask(running.client(), messages))
        until(lambda: measured(running)["visspec_queue"] == 1)
        half = running.raw(PATH, b"host: localhost", JSON, b"content-length: 9")
        began = time.monotonic()
        running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(20)
        assert not running.thread.is_alive() and time.monotonic() - began < 15
        with pytest.raises(openai.InternalServerError, match="an order to stop before this answer was complete"):
            second()
        with pytest.raises(openai.APIError, match="an order to stop before this answer was complete"):
            list(first)
        assert half.recv(100).startswith(b"HTTP/1.1 503")
        half.close()
    assert "Traceback" not in capfd.readouterr().err


def crowd(running, scenes, clients: int, requests: int) -> None:
    """Clients with requests of their own at once, one cut off in the middle: all right, none mixed up."""
    pictures, kinds = [to_image(scene) for scene in scenes], []
    for i, (scene, picture) in enumerate(zip(scenes, pictures)):
        for text, most in (("describe the picture in detail .", 20 + 7 * i), (questions(scene)[i % 5][0], 40)):
            kinds.append((text, picture, most, running.alone(picture, text, max_new_tokens=most)))
    todo, wrong, done = list(range(requests)), [], []

    def work() -> None:
        client = running.client(max_retries=20)
        while todo:
            i = todo.pop()
            text, picture, most, expected = kinds[i % len(kinds)]
            if i % 2:
                found = streamed(client, asked(text, url(picture)), max_tokens=most)[0]
            else:
                found = ask(client, asked(text, url(picture)), max_tokens=most).choices[0].message.content
            (done if found == expected else wrong).append(i)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    until(lambda: len(done) > requests // 4, 300)
    text, picture, *_ = kinds[0]
    cut = ask(running.client(max_retries=20), asked(text, url(picture)), stream=True, max_tokens=200, temperature=1.0)
    next(iter(cut))
    cut.close()
    for thread in threads:
        thread.join(300)
    assert not wrong and sorted(done) == list(range(requests))
    until(lambda: measured(running)["visspec_running"] == 0)
    assert ask(running.client(), asked(text, url(picture))).usage.completion_tokens == SHORT


def test_a_few_clients_at_once(captioner, scenes):
    with Running(captioner, slots=3, places=4, drafter="vispec") as running:
        crowd(running, scenes[:2], clients=6, requests=12)


@pytest.mark.nightly
def test_sixteen_clients_two_hundred_requests_one_cut_off(captioner, scenes):
    with Running(captioner, slots=8, places=64, drafter="vispec") as running:
        crowd(running, scenes, clients=16, requests=200)


@settings(max_examples=400)
@given(st.data())
def test_a_text_in_pieces_is_the_text(data):
    """Words, halves of characters and blanks as tokens. The first token that completes a stop text ends the text, which
    is cut at the earliest stop text; nothing of one is said, however the tokens come.
    """
    table = ["a", "b", " a", "ab", " ", "\n", b"\xc3", b"\xa9", "ba", "é a", "aab b"]
    raw = [piece if isinstance(piece, bytes) else piece.encode() for piece in table]

    def decode(tokens):
        return b"".join(raw[t] for t in tokens).decode(errors="replace")

    tokens = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=12))
    texts = [decode(tokens[:n]).lstrip() for n in range(1, len(tokens) + 1)]
    full = texts[-1] if texts else ""
    ends = st.tuples(st.integers(0, len(full)), st.integers(1, 5)).map(lambda at: full[at[0] : sum(at)])
    stops = data.draw(st.lists((ends | st.text("abé ", max_size=4)).filter(bool), max_size=3))
    writer, said, left = StopTextFilter(decode, stops), "", list(tokens)
    last = next((n for n, text in enumerate(texts, 1) if any(s in text for s in stops)), None)
    expected = full.rstrip()
    if last is not None:
        cut = texts[last - 1]
        expected = cut[: min(cut.find(s) for s in stops if s in cut)].rstrip()
    while left and not writer.stopped:
        count = data.draw(st.integers(1, 4))
        said, left = said + writer.add(left[:count]), left[count:]
        assert expected.startswith(said)
    said += writer.finish()
    assert said == writer.text == expected and writer.stopped == (last is not None)
    assert writer.tokens == tokens[:last]


def test_jobs_that_nobody_wants_any_more_are_passed_by():
    seen = []

    class Noting(QueueWorker):
        def _work(self):
            while (job := self._next(block=True)) is not None:
                seen.append(job)

    jobs = [QueuedRequest(print, cancelled=i == 1) for i in range(3)]
    worker = Noting("x", ServerMetrics())
    for job in jobs:
        worker.submit(job)
    worker.close()
    assert seen == [jobs[0], jobs[2]]


def test_a_missing_extra_and_bad_arguments_are_sentences(monkeypatch, capsys):
    from tests.test_cli import refused

    assert "--port: got 70000" in refused(capsys, "serve", "--port", "70000")
    assert "--slots" in refused(capsys, "serve", "--slots", "0")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "fastapi is not installed, expected it (pip install 'visspec[serve]')" in refused(capsys, "serve")


@contextmanager
def command(said, *argv):
    """`visspec serve` in a process of its own, which prints to the file `said`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = children.command(["serve", "--port", str(port), *argv], said)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        for _ in range(600):
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert process.is_alive(), said.read_text()
                time.sleep(0.1)
        yield process, client
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_the_command_ends_with_zero_after_sigterm(captioner, scenes, tmp_path):
    with command(tmp_path / "said", "--slots", "2", "--drafter", "none") as (process, client):
        first = iter(ask(client, asked("describe the picture in detail .", url(to_image(scenes[0]))), stream=True))
        next(first)
        process.terminate()
        *_, last = first
        assert last.choices[0].finish_reason == "length"
        process.join(20)
        assert process.exitcode == 0 and not re.search("Traceback|Error", (tmp_path / "said").read_text())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("requests", [10, pytest.param(200, marks=pytest.mark.nightly)])
def test_requests_of_large_pictures_stay_below_two_gigabytes(requests, captioner, tmp_path):
    """16 million pixels a picture, in every eighth request eight of them: all are answered or told to come again.
    Decoded at once those of 10 requests would take 1.15 GB beside what the process has.
    """

    def kilobytes(name: str) -> int:
        with open(f"/proc/{process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(name))

    pictures, told = [url(Image.new("RGB", (4000, 4000), (i, 0, 0))) for i in range(8)], []
    with command(tmp_path / "said", "--drafter", "ngram") as (process, client):

        def work(i: int) -> None:
            try:
                messages = asked("describe the picture .", *pictures[: 1 if i % 8 else 8])
                told.append(ask(client.with_options(timeout=3000), messages).choices[0].finish_reason)
            except openai.RateLimitError:
                told.append("later")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(requests)]
        before = kilobytes("VmRSS")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        peak = kilobytes("VmHWM")
    assert len(told) == requests and set(told) <= {"stop", "length", "later"}
    assert len(told) - told.count("later") >= requests // 5
    assert peak * 1024 < 2_000_000_000 and (peak - before) * 1024 < 900_000_000
