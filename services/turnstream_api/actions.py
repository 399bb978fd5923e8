"""What a person does by himself in a session: a tool of the session's agent, called without its model."""

from typing import Literal

import msgspec

from turnstream.session.commands import Act
from turnstream.session.events import RunRequested, ToolCall
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.checks import Author, ExpectedSeq, Wait
from turnstream_api.errors import Problem
from turnstream_api.operation import Request
from turnstream_api.watched import Watched, watched

CALL = "action"
"""Id of the only call of an action's run."""


class ActInSession(Request, frozen=True, kw_only=True):
    """`verb` is a tool of the session's agent, `arguments` are what it is called with."""

    session: str
    verb: str
    arguments: dict[str, object] | None = None
    author: Author | None = None
    expected_seq: ExpectedSeq | None = None
    wait: Wait = 0.0


class Acted(Watched, frozen=True, kw_only=True, omit_defaults=True):
    """`run` carries the action out: it has `started`, or is `queued` until it is its turn. `seq`: the event that asks
    for it. `status` and `outcome` are there if `wait` asked for them; what the tool returned is the run's output."""

    verb: str
    routed: Literal["started", "queued"]


async def act_in_session(api: Api, caller: Caller, request: ActInSession) -> Answer | Stream:
    """Does something in a session by oneself: a run that calls one tool of the session's agent, with no model and
    unasked, and shows later turns what came of it. Where a run is live it is refused, waits for its turn, or starts
    beside, as the session's policy says (`on_busy`)."""
    key = checks.session_key(caller, request.session)
    arguments = request.arguments or {}
    checks.value(arguments, "arguments", api.settings.message_max)
    body = msgspec.structs.replace(request, wait=0.0, expected_seq=None)
    origin = api.origin(caller, "act_in_session", body, expected_seq=request.expected_seq)
    agents = api.agents(caller.account)
    command = Act(
        origin=origin,
        action=ToolCall(id=CALL, name=request.verb, arguments=msgspec.json.encode(arguments).decode()),
        author=request.author or caller.actor,
        specs=agents,
        tools=agents.tools,
    )
    handled = await api.handle(key, command)
    recorded = handled.recorded
    replayed = recorded is None
    receipt = handled.session.receipt(origin.idempotency_key) if replayed else None
    if receipt:
        recorded = await api.log.at(key, receipt.seq)
    data = recorded.event.data if recorded else None
    if recorded is None or not isinstance(data, RunRequested):  # only a repeat is answered without an event
        raise Problem("internal_error", f"the action in session {key.session} was not stored")
    acted = Acted(
        session=key.session,
        seq=recorded.seq,
        run=key.run(data.run),
        verb=request.verb,
        routed="queued" if data.queued else "started",
    )
    return await watched(
        api, caller, handled.session, data.run, acted, wait=request.wait, replayed=replayed, attached=True
    )
