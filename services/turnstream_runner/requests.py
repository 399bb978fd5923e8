"""What a run asks of a person, and what the answer is to the model.

A question is a call of the control tool `conversation_ask_user`; an approval is for a call of a tool that needs one.
What was approved is bound to a digest of the tool, its schema and the arguments: what would run later is compared with
it.
"""

from typing import Final, Literal

import msgspec

from turnstream import schemas
from turnstream.session import answers
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    ASK_USER,
    Ask,
    MessagePosted,
    Recorded,
    RequestAnswered,
    RequestExpired,
    ToolCall,
)
from turnstream.session.messages import text_of
from turnstream.session.paths import place
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.results import Came
from turnstream_runner.room import cut
from turnstream_runner.unicode import fit

PROMPT_MAX: Final = 16 * 1024
"""Bytes of a prompt as JSON."""
CHOICES_MAX: Final = 100
EXPIRY_MAX: Final = 366 * 86_400
"""Seconds."""

QUESTION: Final = ToolSpec(
    ASK_USER,
    "Asks the person you talk with and waits for the answer. Use it only for what you cannot find out yourself.",
    {
        "type": "object",
        "properties": {
            "question": {"type": "string", "description": "What you ask."},
            "choices": {"type": "array", "items": {"type": "string"}, "description": "The only answers that do."},
            "schema": {"type": "object", "description": "A JSON Schema of the answer."},
            "expires_in": {"type": "number", "description": "Seconds to wait for an answer; absent: for ever."},
            "on_expiry": {
                "enum": ["fail", "default", "null"],
                "description": "What happens then: the run fails, `default` is the answer, or there is none.",
            },
            "default": {"description": "The answer if nobody answers in time."},
        },
        "required": ["question"],
        "additionalProperties": False,
    },
)


class _Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    question: str
    choices: list[str] = []
    schema: dict[str, object] | None = None
    expires_in: float | None = None
    on_expiry: Literal["fail", "default", "null"] | None = None
    default: object = msgspec.UNSET


def question(call: ToolCall, request: str, path: str = "") -> Ask:
    """What this call asks. Raises `ValueError` for one that cannot be asked."""
    try:
        asked = msgspec.json.decode(fit(call.arguments), type=_Question)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the arguments do not fit: {error}") from None
    if not asked.question.strip():
        raise ValueError("the question is empty")
    choices = tuple([choice.strip() for choice in asked.choices])  # as a message that answers is taken
    if len(choices) > CHOICES_MAX or not all(choices):
        raise ValueError(f"choices: {CHOICES_MAX} at most, and none is blank")
    if asked.schema is not None and (fault := schemas.fault_of(asked.schema)):
        raise ValueError(f"schema: {fault}")
    for choice in choices:
        _check("choices", choice, asked, choices)
    if asked.expires_in is not None and not 0 < asked.expires_in <= EXPIRY_MAX:
        raise ValueError(f"expires_in: more than 0 and at most {EXPIRY_MAX} seconds")
    has_default = asked.default is not msgspec.UNSET
    on_expiry = asked.on_expiry or ("default" if has_default else "fail")
    if on_expiry == "default" and not has_default:
        raise ValueError("default: is missing")
    if has_default:
        _check("default", asked.default, asked, choices)
    return Ask(
        request=request,
        kind="question",
        **place(path),
        call_id=call.id,
        prompt=_prompt(asked.question),
        schema=asked.schema,
        choices=choices,
        expires_in=None if asked.expires_in is None else max(1, round(asked.expires_in * 1000)),
        on_expiry=on_expiry,
        default=asked.default if has_default else None,
    )


def _check(field: str, answer: object, asked: _Question, choices: tuple[str, ...]) -> None:
    """What the model itself gives as an answer has to be one."""
    schema = "" if asked.schema is None else msgspec.json.encode(asked.schema).decode()
    try:
        answers.check(answer, schema, choices)
    except Rejected as refusal:
        raise ValueError(f"{field}: it does not do as an answer: {refusal.message}") from None


def approval(call: ToolCall, request: str, path: str = "", *, digest: str, timeout: float | None) -> Ask:
    """The question whether this call may be carried out. `timeout` is in seconds."""
    return Ask(
        request=request,
        kind="approval",
        **place(path),
        call_id=call.id,
        prompt=_prompt(f"{call.name} {fit(call.arguments)}"),
        digest=digest,
        expires_in=None if timeout is None else max(1, round(timeout * 1000)),
    )


def came_of(ask: Ask, closing: Recorded) -> Came:
    """What came of a request, for its call."""
    match closing.event.data:
        case RequestAnswered() as said if ask.kind == "question":
            return _answered(said.answer)
        case RequestAnswered() as said:
            return Came(status="denied", error=said.reason or f"denied by {said.by}")
        case MessagePosted(answers=given) as posted if given is not None:
            answer = next(one for one in given.requests if one.request == ask.request)
            return Came(status="denied", error=text_of(posted)) if answer.declined else _answered(answer.answer)
        case RequestExpired() if ask.kind == "approval":
            return Came(status="denied", error="nobody approved it in time")
        case RequestExpired():
            return _answered(ask.default if ask.on_expiry == "default" else None)
        case other:
            raise ValueError(f"event {closing.seq}, a {type(other).__name__}, closes no request")


def _prompt(text: str) -> str:
    """Whoever decides is told that it is not the whole."""
    head = cut(text, PROMPT_MAX)
    return text if head == text else f"{head}\n[cut: {len(text)} characters in all]"


def _answered(answer: object) -> Came:
    """None, of a question that nobody answered where that is no failure, is `null` to whoever asked."""
    if isinstance(answer, str):
        return Came(output=answer)
    return Came(output=msgspec.json.encode(answer).decode(), json=True)
