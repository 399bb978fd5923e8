import asyncio
import json
import time
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstream.session.events import ASK_USER, Attachment, ToolCall
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream_runner.models import script
from turnstream_runner.models.demo import UNICODE, DemoModel
from turnstream_runner.models.port import (
    Image,
    Item,
    ModelError,
    ModelRequest,
    ReasoningDelta,
    Reply,
    Shown,
    TextDelta,
    ToolSpec,
)


def request(*messages: Message | str, **fields: Any) -> ModelRequest:
    said = tuple(UserMessage(message) if isinstance(message, str) else message for message in messages)
    return ModelRequest(model="demo", messages=said, **fields)


CALL = ToolCall(id="c1", name="add", arguments="{}")


async def items(asking: ModelRequest) -> list[Item]:
    async with aclosing(DemoModel().stream(asking)) as stream:
        return [item async for item in stream]


async def reply(*messages: Message | str, **fields: Any) -> Reply:
    """The one reply, which is last and is what was streamed."""
    *deltas, last = await items(request(*messages, **fields))
    assert isinstance(last, Reply)
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == last.text
    assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == last.reasoning
    return last


async def test_plain_text_is_answered_with_what_was_heard_and_what_came_before() -> None:
    first = await reply("My name is Ada.")
    assert "“My name is Ada.”" in first.text
    assert "first thing" in first.text
    second = await reply("My name is Ada.", AssistantMessage(first.text), "Who am I?")
    assert "“Who am I?”" in second.text
    assert "one thing" in second.text
    assert "“My name is Ada.”" in second.text
    third = await reply("a", AssistantMessage("A"), "b", AssistantMessage("B"), "c")
    assert "2 things" in third.text
    assert "“b”" in third.text


async def test_the_same_request_has_the_same_answer() -> None:
    asking = request("hello [think hm] [tool add {}]", instructions="x" * 100)
    assert await items(asking) == await items(asking)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("echo [say x] \u2028 verbatim ", "[say x] \u2028 verbatim "),
        ("[say exactly this]", "exactly this"),
        ("[say with [brackets] inside]", "with [brackets] inside"),
        ("[size 20]", "0123456789abcde\n0123"),
        ("[unicode]", UNICODE),
        ("[slow 3 0ms]", "word1 word2 word3"),
        ("[think hm]", "Done."),
        ("[empty]", ""),
    ],
)
async def test_what_is_said(prompt: str, text: str) -> None:
    assert (await reply(prompt)).text == text


async def test_brackets_that_are_no_directive_are_text() -> None:
    assert "[link](x) [sayso] [ tool ]" in (await reply("[link](x) [sayso] [ tool ]")).text


async def test_reasoning_comes_first_and_is_no_text() -> None:
    got = await items(request("[think let me see] [say 4]"))
    assert got[0] == ReasoningDelta("let me see")
    assert got[-1].reasoning == "let me see"
    assert got[-1].text == "4"
    assert got[-1].usage.reasoning_tokens == 3


async def test_tools_several_at_once_then_more_then_an_answer() -> None:
    prompt = 'sum [tool add {"a":1,"b":[2,"]"]}] [tool add {"a":3}] [say a moment] [then] [tool sleep {"seconds":1}]'
    first = await reply(prompt)
    assert first.finish == "tool_calls"
    assert first.text == "a moment"
    assert [(call.name, json.loads(call.arguments)) for call in first.tool_calls] == [
        ("add", {"a": 1, "b": [2, "]"]}),
        ("add", {"a": 3}),
    ]
    so_far = (
        prompt,
        AssistantMessage(first.text, first.tool_calls),
        *(ToolMessage(call.id, call.name, "3") for call in first.tool_calls),
    )
    second = await reply(*so_far)
    assert [call.name for call in second.tool_calls] == ["sleep"]
    last = await reply(
        *so_far, AssistantMessage("", second.tool_calls), ToolMessage(second.tool_calls[0].id, "sleep", "slept")
    )
    assert last.text == "add returned 3; add returned 3; sleep returned slept"
    assert last.tool_calls == ()


async def test_call_ids_are_unique_in_the_session() -> None:
    prompt = "[loop add {}] [tool add {}]"
    messages: list[Message] = []
    ids: list[str] = []
    for _ in range(2):
        messages.append(UserMessage(prompt))
        for _ in range(3):
            calls = (await reply(*messages)).tool_calls
            ids += [call.id for call in calls]
            messages += [AssistantMessage("", calls), *(ToolMessage(call.id, call.name, "1") for call in calls)]
    assert len(set(ids)) == len(ids) == 12


async def test_a_loop_never_ends_by_itself() -> None:
    calls = (ToolCall(id="x", name="add", arguments="{}"),)
    step = (AssistantMessage("", calls), ToolMessage("x", "add", "1"))
    assert (await reply("[loop add {}]", *(step * 40))).tool_calls


async def test_an_earlier_turn_that_was_asked_to_fail_fails_once() -> None:
    assert "“hello”" in (await reply("[fail]", "hello")).text


@pytest.mark.parametrize(
    ("prompt", "fails_on", "retryable", "retry_after"),
    [
        ("[fail]", {0, 1, 5}, False, None),
        ("[fail 404]", {0, 1, 5}, False, None),
        ("[fail 503]", {0, 1, 5}, True, None),
        ("[fail 503 2]", {0, 1}, True, None),
        ("[fail 429 1 2s]", {0}, True, 2.0),
    ],
)
async def test_failures_before_the_stream(
    prompt: str, fails_on: set[int], retryable: bool, retry_after: float | None
) -> None:
    for tries in (0, 1, 2, 5):
        if tries in fails_on or (prompt == "[fail 503]" or not retryable):
            with pytest.raises(ModelError) as caught:
                await items(request(prompt, tries=tries))
            assert caught.value.retryable is retryable
            assert caught.value.retry_after == retry_after
        else:
            assert (await reply(prompt, tries=tries)).text == "Done."


async def test_a_stream_that_drops_says_half_and_then_all() -> None:
    heard: list[Item] = []

    async def listen() -> None:
        async for item in DemoModel().stream(request("[drop] [say one two three four]")):
            heard[len(heard) :] = [item]

    with pytest.raises(ModelError) as caught:
        await listen()
    assert caught.value.retryable
    assert "".join(item.text for item in heard) == "one two"
    assert (await reply("[drop] [say one two three four]", tries=1)).text == "one two three four"


async def test_the_token_limit_cuts_and_says_so() -> None:
    cut = await reply("[cut 2] [say one two three]")
    assert (cut.text, cut.finish) == ("one two", "length")
    spent = await reply("[think on and on] [cut 0]")
    assert (spent.text, spent.finish) == ("", "length")
    assert not spent.is_empty
    assert (await reply("[empty]")).is_empty


@pytest.mark.parametrize("prompt", ["[hang]", "[hang late] [say one two]", "[wait 59m]", "[slow 60m] x"])
async def test_what_hangs_can_be_cancelled(prompt: str) -> None:
    began = asyncio.Event()

    async def listen() -> None:
        async with aclosing(DemoModel().stream(request(prompt))) as stream:
            began.set()
            async for _ in stream:
                pass

    listening = asyncio.create_task(listen())
    await began.wait()
    await asyncio.sleep(0)
    assert not listening.done()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening


async def test_slow_is_word_by_word() -> None:
    before = time.monotonic()
    *deltas, _ = await items(request("[slow 5 10ms]"))
    assert [delta.text for delta in deltas] == ["word1", " word2", " word3", " word4", " word5"]
    assert time.monotonic() - before >= 0.05


@pytest.mark.parametrize(
    "prompt",
    [
        "[tool]",
        "[tool add {bad]",
        "[tool add [1]]",
        '[tool add {"a":1} x]',
        "[slow]",
        "[slow 5]",
        "[slow -1 5ms]",
        "[slow 9999999999 5ms]",
        "[size 1TB]",
        "[size 9999MB]",
        "[fail 200]",
        "[fail x]",
        "[drop -1]",
        "[cut]",
        "[wait 5]",
        "[wait 1h]",
        "[wait 99999999m]",
        "[hang now]",
        "[opaque no]",
        "[ask Which? {]",
        "[ask Which? {} or what?]",
    ],
)
async def test_a_directive_that_cannot_be_read_is_named(prompt: str) -> None:
    assert (await reply(prompt)).text.startswith(f"I did not understand {prompt}: ")


async def test_help_and_about_say_what_there_is() -> None:
    text = (await reply("[help]")).text
    names = "say think tool loop ask delegate then slow wait hang fail drop empty cut size unicode opaque attachments"
    for name in (*names.split(), "read", "about", "help"):
        assert f"[{name}" in text
    about = json.loads(
        (
            await reply(
                "hi",
                AssistantMessage("hello"),
                "[about]",
                instructions="Be brief.",
                tools=(ToolSpec("add", "", {}),),
                params={"seed": 1},
            )
        ).text
    )
    assert about == {
        "model": "demo",
        "instructions": "Be brief.",
        "params": {"seed": 1},
        "tools": ["add"],
        "messages": [{"user": "hi"}, {"assistant": "hello"}, {"user": "[about]"}],
    }


NOTES = Attachment(name="notes.txt", media_type="text/plain", size=5, sha256="", blob="1")
PAGE = Attachment(name="my page.png", media_type="image/png", size=7, sha256="", blob="2")
SEEN = (Shown(text="hello [fail]"), Shown(image=Image("image/png", b"1234567")))


async def test_what_is_attached_is_listed_and_read() -> None:
    sent = UserMessage("[attachments]", (NOTES, PAGE))
    listed = "notes.txt (text/plain, 5 bytes): 12 bytes of text\nmy page.png (image/png, 7 bytes): an image of 7 bytes"
    assert (await reply(sent, shown=SEEN)).text == listed
    assert (await reply(sent, AssistantMessage("x"), "[attachments]", shown=SEEN)).text == listed
    lost = await reply(sent, shown=(Shown(), Shown(missing=True)))
    assert [line.rpartition(": ")[2] for line in lost.text.splitlines()] == ["its name", "that it is missing"]
    assert (await reply("[attachments]")).text == "Nothing is attached."
    assert (await reply(sent, AssistantMessage("x"), "[read notes.txt]", shown=SEEN)).text == "hello [fail]"
    for name in ("my page.png", "none"):
        assert (await reply(sent, AssistantMessage("x"), f"[read {name}]", shown=SEEN)).text.startswith(
            "I was shown no"
        )
    assert (await reply("[read]")).text.startswith("I did not understand [read]")


async def test_what_is_attached_is_no_prompt() -> None:
    assert (await reply(UserMessage("echo hi", (NOTES,)), shown=SEEN[:1])).text == "hi"
    assert (await reply(UserMessage("", (NOTES, PAGE)), shown=SEEN)).text == "You sent notes.txt, my page.png."
    about = json.loads((await reply(UserMessage("[about]", (NOTES,)), shown=SEEN[:1])).text)["messages"]
    framed = '<attachment name="notes.txt" type="text/plain" size="5">\nhello [fail]\n</attachment>'
    assert about == [{"user": "[about]", "attachments": [framed]}]


async def test_what_came_with_an_answer_is_no_prompt_either() -> None:
    asked = AssistantMessage("", (ToolCall(id="a", name=ASK_USER, arguments="{}"),))
    answered = ToolMessage("a", ASK_USER, "this one")
    prompt = "[ask Which?] [then] [say It is done.]"
    text = (await reply(prompt, asked, answered, UserMessage("", (NOTES,)), shown=SEEN[:1])).text
    assert text == "It is done."


async def test_tokens_of_attachments_are_counted() -> None:
    bare = (await reply(UserMessage("x", (NOTES,)))).usage.input_tokens
    assert (await reply(UserMessage("x", (NOTES,)), shown=SEEN[:1])).usage.input_tokens == bare + 3


@pytest.mark.parametrize(
    ("prompt", "arguments"),
    [
        ("[ask Which colour?]", {"question": "Which colour?"}),
        ('[ask Is it "[odd]?]', {"question": 'Is it "[odd]?'}),
        ('[ask Which? {"choices": ["a]", "\\"b"]}]', {"question": "Which?", "choices": ["a]", '"b']}),
        (
            '[ask When? {"schema":{"type":"integer"},"expires_in":0.5,"on_expiry":"default","default":7}] please',
            {
                "question": "When?",
                "schema": {"type": "integer"},
                "expires_in": 0.5,
                "on_expiry": "default",
                "default": 7,
            },
        ),
        ("[ask]", {"question": ""}),
    ],
)
async def test_a_person_is_asked(prompt: str, arguments: dict[str, Any]) -> None:
    [call] = (await reply(prompt)).tool_calls
    assert (call.name, json.loads(call.arguments)) == (ASK_USER, arguments)


async def test_an_answer_says_what_was_answered() -> None:
    asked = await reply("[ask Which colour?] [tool ask_first {}]")
    question, approval = asked.tool_calls
    said = AssistantMessage("", asked.tool_calls)
    answered = ToolMessage(question.id, question.name, "red")
    denied = ToolMessage(approval.id, approval.name, "denied: not today", is_error=True)
    last = await reply("[ask Which colour?] [tool ask_first {}]", said, answered, denied)
    assert last.text == "You answered: “red”; ask_first returned denied: not today"
    failed = ToolMessage(question.id, question.name, "error: the question is empty", is_error=True)
    alone = AssistantMessage("", (question,))
    assert (await reply("[ask ]", alone, failed)).text == f"{ASK_USER} returned error: the question is empty"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ((AssistantMessage("", (CALL,)),), "no result of 'c1'"),
        ((AssistantMessage("", (CALL,)), UserMessage("and?")), "no result of 'c1'"),
        ((ToolMessage("c1", "add", "1"),), "'c1', which has no call"),
        ((AssistantMessage("", (CALL,)), *[ToolMessage("c1", "add", "1")] * 2), "'c1', which has no call"),
        ((UserMessage(" "),), "an empty message"),
    ],
)
async def test_a32_a33_a36_it_refuses_what_providers_refuse(messages: tuple[Message, ...], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        await reply("hello", *messages)


async def test_an_opaque_token_is_of_one_reply_of_one_run() -> None:
    prompt = "[opaque] [tool add {}] [then] [opaque] [tool add {}]"
    first = await reply(prompt, idempotency_key="acme/s1.1:1")
    assert first.opaque
    assert (await reply("[tool add {}]", idempotency_key="acme/s1.1:1")).opaque == b""
    so_far: list[Message | str] = [
        prompt,
        AssistantMessage("", first.tool_calls),
        ToolMessage("call_1_1_1", "add", "1"),
    ]
    second = await reply(*so_far, idempotency_key="acme/s1.1:2", opaque=(first.opaque,))
    assert second.opaque not in (b"", first.opaque)
    so_far += [AssistantMessage("", second.tool_calls), ToolMessage("call_1_2_1", "add", "2")]
    whole = {"idempotency_key": "acme/s1.1:3", "opaque": (first.opaque, second.opaque)}
    assert (await reply(*so_far, **whole)).text == "add returned 1; add returned 2"
    lost = await reply(*so_far, **{**whole, "opaque": (b"", second.opaque)})
    assert lost.text == "add returned 1; add returned 2; the token of step 1 is missing"
    other = await reply(prompt, idempotency_key="acme/s1.2:1")
    for wrong in ((second.opaque, first.opaque), (other.opaque, b""), (first.opaque, b"x")):
        with pytest.raises(ModelError, match="gave with another reply"):
            await reply(*so_far, **{**whole, "opaque": wrong})


async def test_tokens_are_a_quarter_of_the_bytes() -> None:
    usage = (await reply("12345678", instructions="1234")).usage
    assert usage.input_tokens == 3
    assert (await reply("[say 123456789]")).usage.output_tokens == 3
    assert usage.cached_tokens == 0


async def test_it_keeps_a_checklist() -> None:
    (*_, last) = await items(request("[plan x Boil water | > Steep the tea | Pour] [then] [say Nearly.]"))
    (call,) = last.tool_calls
    assert call.name == "update_plan"
    assert json.loads(call.arguments) == {
        "items": [
            {"text": "Boil water", "status": "completed"},
            {"text": "Steep the tea", "status": "in_progress"},
            {"text": "Pour", "status": "pending"},
        ]
    }
    (*_, last) = await items(request("[plan a | | b]"))
    assert "an item of it is empty" in last.text


async def test_a_huge_answer_comes_in_bounded_pieces() -> None:
    *deltas, last = await items(request("[size 1MB]"))
    assert len(last.text) == 1 << 20
    assert max(len(delta.text) for delta in deltas) <= 32 * 1024


@settings(deadline=None)
@given(st.text(max_size=300) | st.text(alphabet='[]{}":, toolsaythnk0129msfailcu\\', max_size=200))
def test_any_prompt_can_be_read(prompt: str) -> None:
    steps = script.parse(prompt)
    assert steps
    assert all(step.words is None or step.words <= script.WORDS_MAX for step in steps)


_PIECES = [
    *("[say x]", "[say", "[think hm]", "[tool add {}]", "[tool", "[tool a b]", "[loop x]", "[then]", "[fail]"),
    *("[fail 503 1]", "[drop]", "[drop always]", "[empty]", "[cut 1]", "[size 10]", "[size 9", "[unicode]", "[about]"),
    *("[ask x]", "[ask x {}]", "[ask {", "[opaque]", "[plan a | x b]", "[plan |"),
    *("[help]", "]", "{", "}", "\\", '"', "echo ", "\ud800", "\0", "[slow 3 0ms]", "[wait 0s]"),
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(_PIECES) | st.text(max_size=5), max_size=12).map(" ".join), st.integers(0, 3))
def test_no_prompt_breaks_the_model(prompt: str, tries: int) -> None:
    try:
        last = asyncio.run(items(request("before", prompt, tries=tries)))[-1]
    except ModelError:
        return
    assert isinstance(last, Reply)


def test_a_long_prompt_of_open_brackets_is_read_in_reasonable_time() -> None:
    before = time.monotonic()
    script.parse("[say " * 13_000)
    script.parse("[tool x {" * 7_000)
    assert time.monotonic() - before < 2


@pytest.mark.parametrize(
    ("prompt", "order"),
    [
        ("[delegate echo hi]", {"brief": "echo hi"}),
        ("[delegate Don't say \"hi]", {"brief": "Don't say \"hi"}),
        ('[delegate [tool add {"a": 1}]]', {"brief": '[tool add {"a": 1}]'}),
        ('[delegate [hang] {"timeout": 2, "wait": false}] please', {"brief": "[hang]", "timeout": 2, "wait": False}),
        (
            '[delegate [say {"n": 1}] {"schema": {"required": ["n"]}}]',
            {"brief": '[say {"n": 1}]', "schema": {"required": ["n"]}},
        ),
        ("[delegate [delegate [delegate echo deep]]]", {"brief": "[delegate [delegate echo deep]]"}),
        ("[delegate]", {"brief": ""}),
    ],
)
async def test_another_agent_is_asked(prompt: str, order: dict[str, Any]) -> None:
    (call,) = (await reply(prompt)).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("delegate", order)


async def test_what_other_agents_came_to_is_said() -> None:
    asked = await reply("[delegate echo a][delegate echo b]")
    said = AssistantMessage("", asked.tool_calls)
    results = [
        ToolMessage(call_id=call.id, name="delegate", text=text)
        for call, text in zip(asked.tool_calls, ("a", "b"), strict=True)
    ]
    last = await reply("[delegate echo a][delegate echo b]", said, *results)
    assert last.text == "delegate returned a; delegate returned b"
