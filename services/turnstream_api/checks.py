"""What requests have in common, and how it is checked. Each failure names the field."""

import re
from collections.abc import Mapping
from typing import Annotated, cast

import msgspec
from msgspec import Meta

from turnstream import ids
from turnstream.agents.models import lookup
from turnstream.ids import SessionKey
from turnstream.session.events import NO_POLICY, Opens, PolicyData, Title, TitleSource
from turnstream_api.api import Api, Caller
from turnstream_api.errors import Problem

TITLE_MAX = 64
WAIT_MAX = 300.0
DEPTH_MAX = 32
"""Levels of metadata and answers: what one reader can take apart must not be too deep for the next."""
CONTEXT_MAX = 16 * 1024
"""Bytes of what a message says of the window that it comes from."""
_AT_ONCE = 0.25
"""Seconds before a sequence that is not shown is looked up."""
AUTHOR = re.compile(r"(user|agent|client):[A-Za-z0-9._@:+-]{1,64}")
"""Who may be named as an author or an actor from outside."""

WHOLE = r"$(?!\n)"
"""The end of a text, in the regular expressions of Python and of JSON Schema alike: `$` alone lets a line end pass."""
Metadata = Annotated[dict[str, object], Meta(description="Anything of yours, 8 KiB as JSON at most.")]
TitleText = Annotated[str, Meta(min_length=1, max_length=TITLE_MAX)]
SessionId = Annotated[
    str, Meta(pattern=rf"^{ids.TOKEN.pattern}{WHOLE}", description="A new session's id must not contain `--`.")
]
MessageId = Annotated[
    str, Meta(pattern=rf"^{ids.TOKEN.pattern}{WHOLE}", description="Also the message's idempotency key.")
]
AgentName = Annotated[
    str,
    Meta(
        pattern=rf"^{ids.NAME.pattern}(@{ids.VERSION.pattern})?{WHOLE}",
        description="`name`, which is the current version of it, or `name@version`.",
    ),
]
ModelName = Annotated[str, Meta(min_length=1, max_length=128, description="Instead of the agent's model.")]
Author = Annotated[str, Meta(pattern=rf"^{AUTHOR.pattern}{WHOLE}", description="Who says it; absent: the caller.")]
WindowContext = Annotated[
    str, Meta(description="What the sender's window shows; the model sees it in this turn only. 16 KiB at most.")
]
Seq = Annotated[int, Meta(ge=0, le=2**53)]
ExpectedSeq = Annotated[
    int, Meta(ge=0, le=2**53, description="Refused with `session_moved` if the session's last sequence is another.")
]
Wait = Annotated[
    float, Meta(ge=0, le=WAIT_MAX, description="Seconds to wait for the run's end, or until it waits for a person.")
]
Limit = Annotated[int, Meta(ge=1, le=200)]
Cursor = Annotated[str, Meta(max_length=512, description="`next` of the page before.")]


def session_key(caller: Caller, session: str) -> SessionKey:
    """The session that a path names. An id that none can have is one that is not there."""
    if not ids.is_session(session):
        raise no_session(session)
    return SessionKey(caller.account, session)


def no_session(session: str) -> Problem:
    return Problem("not_found", f"no session {session[:128]}")


def no_receipt(session: str) -> Problem:
    return Problem("not_found", f"no deletion of a session {session[:128]} is known")


def run_key(caller: Caller, run: str) -> tuple[SessionKey, int]:
    """The session and number of the run that a path names."""
    parsed = ids.parse_run_id(run)
    if parsed is None:
        raise no_run(run)
    session, n = parsed
    return SessionKey(caller.account, session), n


def no_run(run: str) -> Problem:
    return Problem("not_found", f"no run {run[:160]}")


def title(text: str | None, source: TitleSource) -> Title | None:
    if text is None:
        return None
    if not text.strip() or "\0" in text:
        raise Problem("invalid", "title: must not be blank or contain U+0000", field="title")
    return Title(text=text, source=source)


def metadata(api: Api, given: dict[str, object] | None) -> dict[str, object] | None:
    if given is not None:
        value(given, "metadata", api.settings.metadata_max)
    return given


def value(given: object, field: str, limit: int) -> None:
    """Anything that a caller may say, `limit` bytes as JSON at most."""
    if _depth(given) > DEPTH_MAX:
        raise Problem("invalid", f"{field}: nested deeper than {DEPTH_MAX} levels", field=field)
    try:
        size = len(msgspec.json.encode(given))
    except (OverflowError, ValueError) as error:
        raise Problem("invalid", f"{field}: {error}", field=field) from None
    if size > limit:
        raise Problem("too_large", f"{field}: {size} bytes, {limit} are allowed", field=field, limit=limit)


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            break
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                below += cast("list[object]", item)
        level = below
    return depth


def context(given: str) -> str:
    if (size := len(given.encode())) > CONTEXT_MAX:
        message = f"context: {size} bytes, {CONTEXT_MAX} are allowed"
        raise Problem("too_large", message, field="context", limit=CONTEXT_MAX)
    return given


async def agent(api: Api, caller: Caller, name: str | None) -> str | None:
    if name is not None and await api.spec(caller.account, name) is None:
        raise Problem("agent_not_found", f"no agent {name}", field="agent")
    return name


def model(api: Api, name: str | None) -> str | None:
    if name is not None:
        try:
            lookup(name, api.settings.models)
        except LookupError as error:
            raise Problem("invalid", f"model: {error}", field="model") from None
    return name


def opens(
    *,
    agent: str | None,
    title: Title | None,
    metadata: Mapping[str, object] | None,
    policy: PolicyData | None,
    one_shot: bool = False,
) -> Opens:
    """How a session is opened."""
    return Opens(agent=agent, title=title, metadata=dict(metadata or {}), policy=policy or NO_POLICY, one_shot=one_shot)


async def shown(api: Api, seq: int | None) -> None:
    """Waits until the views show this event. Raises `Problem`."""
    timeout = api.settings.after_timeout
    first = min(_AT_ONCE, timeout)
    if not seq or await api.views.wait_for(seq, first):
        return
    if seq > (last := await api.last_seq()):
        raise Problem(
            "invalid", f"after: nothing has sequence {seq} yet, the last one is {last}", field="after", seq=last
        )
    if not await api.views.wait_for(seq, timeout - first):
        raise Problem("projection_behind", f"the views do not show event {seq} yet", seq=seq)
