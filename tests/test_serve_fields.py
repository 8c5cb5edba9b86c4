"""Every field of OpenAI's client: done, refused with a sentence that names it, or without effect on the answer."""

# ruff: noqa: E402 (what is imported needs the extra)

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
openai = pytest.importorskip("openai", reason="the client `openai` is not installed (extra `test`)")

from openai.types import image_generate_params
from openai.types.chat import completion_create_params

from tests.test_serve import SHORT, Running, ask, asked, in_thread, url
from visspec.api import chat_inputs, completions
from visspec.api.answers import token_logprobs
from visspec.api.captions import prepare
from visspec.api.completions import RequestError, RequestLimits
from visspec.api.penalties import GeneratedTokenPenalties
from visspec.io import included


@pytest.fixture(scope="module")
def running(captioner, pipe):
    with Running(captioner, pipe=pipe) as found:
        yield found


@pytest.fixture(scope="module")
def picture():
    return included.scenes("shapes").images(1)[0]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def entries(answer) -> list:
    return answer.choices[0].logprobs.content


def words(answer) -> list[str]:
    return answer.choices[0].message.content.split()


FEW = 6  # tokens of an answer
DONE: dict[str, tuple[dict, Callable]] = {  # a request, and what is true of its answer
    "messages": ({"messages": asked("what ?")}, lambda a: a.usage.prompt_tokens < 12),
    "model": ({"model": "captioner"}, lambda a: a.model == "captioner"),
    "frequency_penalty": ({"frequency_penalty": 2.0, "max_tokens": 20}, lambda a: "we begin in" in " ".join(words(a))),
    "presence_penalty": ({"presence_penalty": 2.0, "max_tokens": 20}, lambda a: "we begin in" in " ".join(words(a))),
    "logit_bias": ({"logit_bias": {"5": 100}}, lambda a: len({*words(a)}) == 1),
    "logprobs": ({"logprobs": True}, lambda a: [e.top_logprobs for e in entries(a)] == [[]] * FEW),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, lambda a: {len(e.top_logprobs) for e in entries(a)} == {2}),
    "max_completion_tokens": ({"max_completion_tokens": 3}, lambda a: a.usage.completion_tokens == 3),
    "max_tokens": ({"max_tokens": 2}, lambda a: a.usage.completion_tokens == 2),
    "n": ({"n": 2}, lambda a: [c.index for c in a.choices] == [0, 1]),
    "stop": ({"stop": "three"}, lambda a: words(a) == ["this", "picture", "shows"]),
    "seed": ({"seed": 2**61, "temperature": 3}, lambda a: words(a) != BEGUN),
    "temperature": ({"temperature": 3, "seed": 3}, lambda a: words(a) != BEGUN),
    "top_p": ({"temperature": 3, "seed": 3, "top_p": 0.01}, lambda a: words(a) == BEGUN),
    "stream": (
        {"stream": True},
        lambda a: "".join(c.choices[0].delta.content or "" for c in a) == " ".join(BEGUN),
    ),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda a: [*a][-1].usage.completion_tokens == FEW,
    ),
}
BEGUN = "this picture shows three shapes in".split()  # in FEW tokens
SAID = "this picture shows three shapes in all. the ground behind them".split()
SAME: dict[str, list] = {  # values that change no answer
    "metadata": [{"a": "b"}],
    "prompt_cache_key": ["k"],
    "prompt_cache_options": [{"ttl": "30m"}],
    "prompt_cache_retention": ["24h"],
    "safety_identifier": ["u"],
    "store": [True, False],
    "user": ["u"],
    "frequency_penalty": [0, 0.0],
    "presence_penalty": [0],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "top_logprobs": [0],
    "modalities": [["text"]],
    "n": [1],
    "parallel_tool_calls": [True, False],
    "reasoning_effort": ["none"],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"],
    "stop": [[]],
    "stream": [False],
    "stream_options": [{"include_usage": True}],
    "temperature": [0],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_p": [0.5],
    "verbosity": ["medium"],
}
REFUSED: dict[str, list] = {
    "audio": [{"voice": "a", "format": "wav"}],
    "frequency_penalty": [2.1, -2.1, "1", True],
    "presence_penalty": [2.1, -2.1],
    "function_call": [{"name": "f"}],
    "functions": [[{"name": "f"}]],
    "logit_bias": [{"5": 101}, {"5": -100.5}, {"164": 1}, {"-1": 1}, {"x": 1}, {"5": "1"}, [5]],
    "logprobs": [1, "yes"],
    "top_logprobs": [2, 21, -1],  # without logprobs
    "max_completion_tokens": [0],
    "max_tokens": [0, -1, 1.5],
    "messages": [[], "x"],
    "modalities": [["text", "audio"]],
    "moderation": [{"model": "m"}],
    "n": [0, 17, 1.5, True],
    "parallel_tool_calls": ["no"],
    "prediction": [{"type": "content", "content": "x"}],
    "reasoning_effort": ["low"],
    "response_format": [{"type": "json_schema"}],
    "seed": [-1, 2**62 + 1],
    "service_tier": ["flex"],
    "stop": [["a"] * 5, [""], ""],
    "stream": ["yes"],
    "stream_options": [{"x": 1}],
    "temperature": [-1, True],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "tools": [[TOOL], [{"type": "web_search"}], [{"type": "function"}]],
    "top_p": [0, 1.1],
    "verbosity": ["low"],
    "web_search_options": [{}],
}
IMAGES_DONE: dict[str, tuple[dict, Callable]] = {
    "prompt": ({"prompt": "a blue ring"}, lambda a: a.output_format == "png"),
    "n": ({"n": 2}, lambda a: len(a.data) == 2),
}
IMAGES_SAME: dict[str, list] = {
    "background": ["auto", "opaque"],
    "frame_count": [1],
    "model": ["painter"],
    "moderation": ["auto", "low"],
    "output_compression": [100],
    "output_format": ["png"],
    "partial_images": [0],
    "quality": ["auto", "standard"],
    "response_format": ["b64_json"],
    "safety_identifier": ["u"],
    "size": ["auto"],
    "stream": [False],
    "user": ["u"],
}
IMAGES_REFUSED: dict[str, list] = {
    "prompt": [" ", 7],
    "background": ["transparent"],
    "complexity": ["low"],
    "frame_count": [2],
    "frame_duration_ms": [10],
    "moderation": ["none"],
    "n": [0, 11],
    "output_compression": [50],
    "output_format": ["webp"],
    "partial_images": [1],
    "quality": ["hd"],
    "response_format": ["url"],
    "size": ["3x", "0x9"],
    "stream": [True],
    "style": ["vivid"],
    "svg": [{"model": "m"}],
}
UNKNOWN = {
    "repetition_penalty": 1.2,
    "min_p": 0.1,
    "guided_json": {},
    "min_tokens": 3,
    "stop_token_ids": [2],
    "temprature": 1,
    "a\nb": 1,
    "\ud800": 1,
}


def answer_of(found) -> dict:
    """What does not differ between two equal answers."""
    return found.model_dump(exclude={"id", "created", "usage"})


def check_fields(kind: type, create: Callable, good: dict, done: dict, same: dict, refused: dict) -> None:
    """Every field of a request of the installed client: a field that it has and these tables have not is a failure."""
    assert set(get_type_hints(kind)) == {*done, *same, *refused}
    plain = answer_of(create(**good))
    for options, holds in done.values():
        assert holds(create(**good | options)), options
    for name, values in same.items():
        for value in values:
            assert answer_of(create(**good | {name: value})) == plain, (name, value)
    for name, values in refused.items():
        for value in values:
            with pytest.raises(openai.BadRequestError, match=rf"{name}: got .*, expected ") as caught:
                create(**good | {name: value})
            assert caught.value.param == name and "\n" not in str(caught.value)
    nulls = dict.fromkeys({*done, *same, *refused} - good.keys())
    assert answer_of(create(**good | {"extra_body": nulls | good.get("extra_body", {})})) == plain


def test_every_field_of_a_chat_is_done_or_refused_or_changes_nothing(running, picture):
    good = {"messages": asked("describe the picture in detail .", url(picture)), "model": "captioner"}
    create, kind = running.client().chat.completions.create, completion_create_params.CompletionCreateParamsStreaming
    check_fields(kind, create, good | {"max_tokens": FEW}, DONE, SAME, REFUSED)


def test_every_field_of_an_image_is_done_or_refused_or_changes_nothing(running):
    create, kind = running.client().images.generate, image_generate_params.ImageGenerateParamsStreaming
    good = {"prompt": "a red ring", "extra_body": {"seed": 5}}
    check_fields(kind, create, good, IMAGES_DONE, IMAGES_SAME, IMAGES_REFUSED)


def test_fields_that_nobody_knows_are_refused(running):
    for read, good in (
        (lambda body: completions.chat(body, RequestLimits()), {"messages": asked("x")}),
        (completions.drawing, {"prompt": "x"}),
    ):
        for name, value in UNKNOWN.items():
            shown = name if name.isidentifier() else ascii(name)
            with pytest.raises(RequestError, match=r": got .*, expected none") as caught:
                read(good | {name: value})
            assert str(caught.value).startswith(f"{shown}: ") and caught.value.param == shown
    with pytest.raises(openai.NotFoundError, match=r"got POST /v1/completions, expected one of .*/v1/chat/completions"):
        running.client().completions.create(model="captioner", prompt="x")


TEXT = "describe the picture in detail ."


def of_generate(running, picture, **options):
    """transformers' own result of the same request, and (T, V) log-probabilities of the model's raw logits."""
    inputs = prepare(running.processor, [picture], TEXT, running.fast.model)
    length, kept = inputs["input_ids"].shape[1], {"return_dict_in_generate": True, "output_logits": True}
    if "logits_processor" in options:
        options["logits_processor"] = [replace(one, prompt=length) for one in options["logits_processor"]]
    model = running.fast if "seed" in options else running.fast.model
    found = model.generate(**inputs, **{"do_sample": False, "max_new_tokens": 20} | kept | options)
    own = running.fast.model.compute_transition_scores(found.sequences, found.logits, normalize_logits=True)[0]
    return found.sequences[0, length:].tolist(), own, torch.stack(found.logits)[:, 0].log_softmax(-1)


@pytest.mark.parametrize(
    "fields, options",
    [
        ({"temperature": 0}, {}),
        (
            {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"30": 3, "2": -100}, "temperature": 0},
            {"logits_processor": [GeneratedTokenPenalties(1.5, 0.5, {30: 3.0, 2: -100.0})]},
        ),
        (
            {"temperature": 1.5, "seed": 4, "top_p": 0.9, "presence_penalty": -1},
            {"do_sample": True, "temperature": 1.5, "seed": 4, "top_p": 0.9, "top_k": 0}
            | {"logits_processor": [GeneratedTokenPenalties(presence=-1.0)]},
        ),
    ],
)
def test_logprobs_are_those_of_transformers_streamed_and_not(running, picture, fields, options):
    """log-softmax of raw logits: before penalties, biases, temperature and cuts."""
    tokens, own, all_TV = of_generate(running, picture, **options)
    tokenizer, messages = running.processor.tokenizer, asked(TEXT, url(picture))
    fields = fields | {"max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    whole = ask(running.client(), messages, **fields).choices[0]
    chunks = [c.choices[0] for c in ask(running.client(), messages, stream=True, **fields)]
    pieces = [entry for c in chunks if c.logprobs for entry in c.logprobs.content]
    for text, found in (
        (whole.message.content, whole.logprobs.content),
        ("".join(c.delta.content or "" for c in chunks), pieces),
    ):
        assert text == tokenizer.decode(tokens, skip_special_tokens=True) == "".join(e.token for e in found)
        assert b"".join(bytes(e.bytes) for e in found).decode() == text
        torch.testing.assert_close(torch.tensor([e.logprob for e in found]), own, atol=1e-4, rtol=0)
        for entry, row in zip(found, all_TV):
            best = torch.tensor([one.logprob for one in entry.top_logprobs])
            torch.testing.assert_close(best, row.topk(3).values, atol=1e-4, rtol=0)
            names = [tokenizer.decode([id]) for id in row.topk(3).indices]
            assert [one.token.strip() for one in entry.top_logprobs] == names


def test_logprobs_of_a_stopped_answer_are_those_of_its_tokens(running, picture):
    """As many as the usage counts, the one that completes the stop text included."""
    for stream in (False, True):
        found = ask(running.client(), asked(TEXT, url(picture)), stop="three shapes", logprobs=True, stream=stream)
        choices = [c.choices[0] for c in found] if stream else found.choices
        parts = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert "".join(parts) == "this picture shows three shapes" and choices[-1].finish_reason == "stop"


def test_entries_of_characters_that_take_several_tokens():
    """A token that ends within a character has no bytes; the last one has all of them."""
    spelled = ["a", b"\xf0", b"\x9f", b"\x98", b"\x80", " b"]
    raw = [one if isinstance(one, bytes) else one.encode() for one in spelled]
    logits = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    logits[0, 1] = -torch.inf

    def decode(ids):
        return b"".join(raw[i] for i in ids).decode(errors="replace")

    found = token_logprobs(decode, [], range(6), logits, 6)
    texts = [entry["token"] for entry in found]
    assert texts[0] == "a" and texts[4:] == ["\U0001f600", " b"]
    assert b"".join(bytes(e["bytes"] or ()) for e in found).decode() == "a\U0001f600 b"
    assert found[0]["top_logprobs"][-1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": None}
    whole = [e["token"] for at in range(6) for e in token_logprobs(decode, range(at), [at], logits[at:][:1], 0)]
    assert whole == texts


def test_choices_have_seeds_that_count_up_whoever_else_asks(running, picture):
    client, messages = running.client(), asked(TEXT, url(picture))
    fields = {"n": 5, "seed": 7, "temperature": 1.5, "max_tokens": 20}
    want = [
        running.alone(picture, TEXT, do_sample=True, temperature=1.5, top_k=0, top_p=1.0, seed=7 + i, max_new_tokens=20)
        for i in range(5)
    ]
    others = [
        in_thread(
            lambda i=i: ask(client, asked("what ?", url(picture)), seed=i, temperature=2, presence_penalty=1, n=3)
        )
        for i in range(3)
    ]
    found = ask(client, messages, **fields)
    assert [choice.message.content for choice in found.choices] == want and len(set(want)) == 5
    chunks = list(ask(client, messages, stream=True, stream_options={"include_usage": True}, **fields))
    told = [
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == i)
        for i in range(5)
    ]
    assert told == want and sum(c.choices[0].finish_reason is not None for c in chunks if c.choices) == 5
    for usage in (found.usage, chunks[-1].usage):
        assert usage.completion_tokens == sum(map(len, (ids_of(running, text) for text in want)))
        assert usage.prompt_tokens == ask(client, messages, max_tokens=1).usage.prompt_tokens
    assert all(len(call().choices) == 3 for call in others)
    assert len(ask(client, messages, n=16, max_tokens=1).choices) == 16  # more than slots


def ids_of(running, text: str) -> list[int]:
    return running.processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_picture_of_several_choices_is_decoded_once(running, picture, monkeypatch):
    read, calls = chat_inputs.read_image, []
    monkeypatch.setattr(chat_inputs, "read_image", lambda *given: calls.append(given) or read(*given))
    assert len(ask(running.client(), asked(TEXT, url(picture)), n=4).choices) == 4 and len(calls) == 1


def test_penalties_count_generated_tokens_alone():
    ids, scores = torch.tensor([[1, 1, 2, 3, 3, 2]]), torch.zeros(1, 5)
    found = GeneratedTokenPenalties(frequency=0.5, presence=0.25, bias={4: 2.0, 3: -1.0}, prompt=3)(ids, scores)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, -0.75, -2.25, 2.0]]))
    assert not scores.any()
    assert torch.equal(GeneratedTokenPenalties(frequency=1.0, prompt=6)(ids, scores), scores)


def test_usage_and_metrics_count_drafted_tokens(captioner, picture):
    with Running(captioner, length="fixed") as running:  # not as the clock of a busy machine would have it
        found = ask(running.client(), asked(TEXT, url(picture)), max_tokens=60).usage
        details = found.completion_tokens_details
        lines = running.get("/metrics").text.splitlines()
    counts = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert counts["visspec_accepted_tokens_total"] == details.accepted_prediction_tokens > 0
    rejected = counts["visspec_drafted_tokens_total"] - counts["visspec_accepted_tokens_total"]
    assert details.rejected_prediction_tokens == rejected >= 0
    assert details.tau == pytest.approx(counts["visspec_tau"], rel=1e-4)
    rounds = counts["visspec_passes_total"]  # each gives one token that was not drafted, as does the prefill
    assert abs(details.accepted_prediction_tokens + rounds + 1 - found.completion_tokens) <= 1


TEMPLATE = {  # of a captioner that calls a tool where it sees something in a corner
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant :",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*in the top left (?P<name>\w+) ",
            "close_pattern": r"bar\.\s*",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"seen": "{content}"}}},
        },
        "content": {"close": "</s>", "content": "text"},
    },
}


@pytest.fixture(scope="module")
def calling(captioner):
    """A server of the captioner with a template that shows tools, and one that reads calls."""
    model, processor = captioner[0], copy.deepcopy(captioner[1])
    shown = "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{% endif %}"
    calls = "{% for call in message['tool_calls'] %}{{ call['function']['arguments']['seen'] }} {% endfor %}"
    turns = processor.chat_template.replace("{% endfor %}{% endif %}", "{% endfor %}" + calls + "{% endif %}", 1)
    processor.chat_template = shown + turns
    processor.tokenizer.response_template = TEMPLATE
    with Running((model, processor)) as found:
        yield found


def test_tools_are_shown_to_the_model_and_its_calls_are_read(calling, picture):
    client, messages = calling.client(), asked(TEXT, url(picture))
    tool = {"type": "function", "function": {"name": "corner", "parameters": {"type": "object", "properties": {}}}}
    plain = ask(client, messages, max_tokens=29)
    assert "in the top left corner there is a small pink bar." in plain.choices[0].message.content
    fields = {"tools": [tool], "tool_choice": "auto", "max_tokens": 40, "stop": "to the"}
    whole = ask(client, messages, **fields)
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens + 1  # the tool's name
    chunks = [chunk.choices[0] for chunk in ask(client, messages, stream=True, **fields)]
    said = "".join(c.delta.content or "" for c in chunks)
    (told,) = [c.delta.tool_calls for c in chunks if c.delta.tool_calls]
    message = whole.choices[0].message
    for text, calls, ended in (
        (message.content, message.tool_calls, whole.choices[0].finish_reason),
        (said, told, chunks[-1].finish_reason),
    ):
        assert text.startswith("this picture shows three shapes in all.") and "corner" not in text
        assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
            ("function", "corner", {"seen": "there is a small pink"})
        ]
        assert ended == "tool_calls" and calls[0].id.startswith("call_")
    cut = ask(client, messages, tools=[tool], max_tokens=12).choices[0]
    assert cut.message.tool_calls is None and cut.message.content.startswith("this") and cut.finish_reason == "length"
    none = ask(client, messages, tools=[tool], tool_choice="none", max_tokens=29)
    assert none.choices[0].message.content == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="parallel_tool_calls: got False, expected true"):
        ask(client, messages, tools=[tool], parallel_tool_calls=False)


def test_calls_and_their_results_go_back_to_the_model(calling, picture):
    client, turn = calling.client(), asked(TEXT, url(picture))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"seen": "two stars"}'}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}]
    result = {"role": "tool", "tool_call_id": "1", "content": "red"}
    before = ask(client, turn).usage.prompt_tokens
    after = ask(client, [*turn, *history, result]).usage.prompt_tokens
    assert after == before + len("assistant : two stars </s> tool : red".split())
    for broken in ({**call, "function": {"name": "f", "arguments": "{"}}, {"id": 1}, "f"):
        with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls: got .*, expected calls with id"):
            ask(client, [*turn, {"role": "assistant", "tool_calls": [broken]}, result])


def test_a_tool_that_can_not_be_read_is_a_text(calling, picture, monkeypatch):
    """A parser that fails on what a model wrote costs nobody an answer."""
    monkeypatch.setattr(calling.writing, "template", {"fields": {"content": {"content": "json"}}})
    found = ask(calling.client(), asked(TEXT, url(picture)), tools=[TOOL]).choices[0]
    assert found.message.content.split() == SAID and found.finish_reason == "length"


def test_models_without_templates_say_which_one_they_lack(captioner):
    processor = copy.deepcopy(captioner[1])
    assert chat_inputs.why_no_tools(processor, True) == "the model's chat template shows no tools"
    processor.chat_template = "{{ tools }}"
    assert "no response_template" in chat_inputs.why_no_tools(processor, False)
    assert chat_inputs.why_no_tools(processor, True) == ""
    processor.chat_template = "{{ tools[0]['function']['name'] + 1 }}"
    assert chat_inputs.why_no_tools(processor, True) == "the model's chat template can't show tools"


def test_what_clients_send_unasked(running, picture):
    """As LangChain and LiteLLM do: texts as parts, nulls, empty lists, fields of earlier answers."""
    client, part = running.client(), {"type": "text", "text": TEXT}
    image = {"type": "image_url", "image_url": {"url": url(picture), "detail": "auto"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "caption"}], "name": None},
        {"role": "user", "content": [image, part]},
    ]
    strange = {"tools": [], "tool_choice": "none", "stream_options": None, "stop": None, "logit_bias": None, "n": 1}
    first = ask(client, messages, max_tokens=None, max_completion_tokens=SHORT, extra_body=strange, user="u")
    own = first.choices[0].message.model_dump()  # function_call, audio, annotations: null
    system = [{"role": "system", "content": "caption"}, *messages[1:]]
    assert ask(client, system).choices[0].message.content == first.choices[0].message.content
    again = ask(client, [*messages, own | {"annotations": [], "tool_calls": []}, {"role": "user", "content": "what ?"}])
    assert again.usage.prompt_tokens > first.usage.prompt_tokens + SHORT
