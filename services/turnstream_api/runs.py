"""Runs: start one of its own, list, look at, wait for, cancel; the waterfall of its steps."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from turnstream import ids
from turnstream.ids import SessionKey
from turnstream.session.commands import CancelRun as CancelCommand
from turnstream.session.events import RunCancelRequested, RunEnded, RunStatus
from turnstream.session.state import Session
from turnstream.views import runs as view
from turnstream.views import steps as steps_view
from turnstream_api import checks, messages, policies
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.attachments import Names
from turnstream_api.checks import (
    AgentName,
    Author,
    Cursor,
    ExpectedSeq,
    Limit,
    MessageId,
    Metadata,
    ModelName,
    SessionId,
    TitleText,
    Wait,
    WindowContext,
)
from turnstream_api.errors import Problem
from turnstream_api.messages import PostMessage, TextPart
from turnstream_api.operation import Read, Request
from turnstream_api.policies import OnBusy, Policy
from turnstream_api.standing import OpenRequest, Outcome, standing_of

T = TypeVar("T")


class StartRun(Request, frozen=True, kw_only=True):
    """`session`: as posting `input` to that session, which is opened if it is not there; `title`, `metadata` and
    `policy` are for one that is opened. Without `session` the run remembers nothing and is remembered by nothing but
    itself."""

    input: str | list[TextPart]
    attachments: Names = []
    context: WindowContext = ""
    agent: AgentName | None = None
    model: ModelName | None = None
    session: SessionId | None = None
    message_id: MessageId | None = None
    author: Author | None = None
    on_busy: OnBusy | None = None
    title: TitleText | None = None
    metadata: Metadata | None = None
    policy: Policy | None = None
    expected_seq: ExpectedSeq | None = None
    wait: Wait = 0.0


async def start_run(api: Api, caller: Caller, request: StartRun) -> Answer | Stream:
    """Starts a run, in a session or by itself."""
    made = request.session is None
    if request.session is not None and not ids.may_open(request.session):
        raise checks.no_session(request.session)
    if made and caller.idempotency_key is None and request.message_id is not None:
        caller = msgspec.structs.replace(caller, idempotency_key=f"message {request.message_id}")
    key = SessionKey(caller.account, request.session or api.session_id(caller, "start_run"))
    opens = checks.opens(
        agent=await checks.agent(api, caller, request.agent),
        title=checks.title(request.title, "client"),
        metadata=checks.metadata(api, request.metadata),
        policy=policies.given(request.policy),
        one_shot=made,
    )
    message = PostMessage(
        session=key.session,
        content=request.input,
        attachments=request.attachments,
        context=request.context,
        message_id=request.message_id,
        author=request.author,
        agent=request.agent,
        model=request.model,
        on_busy=request.on_busy,
        expected_seq=request.expected_seq,
        wait=request.wait,
    )
    fresh = made and caller.idempotency_key is None
    return await messages.post(api, caller, key, message, opens, operation="start_run", request=request, fresh=fresh)


RunName = Annotated[str, Meta(max_length=ids.SESSION_MAX + 32, description="`<session>.<n>`.")]


class ListRuns(Read, frozen=True, kw_only=True):
    """`parent`: those that this run has delegated; `root`: those, and what they have delegated in turn."""

    limit: Limit = 50
    cursor: Cursor | None = None
    session: Annotated[str, Meta(max_length=ids.SESSION_MAX)] | None = None
    status: RunStatus | None = None
    agent: AgentName | None = None
    parent: RunName | None = None
    root: RunName | None = None
    since: (
        Annotated[int, Meta(ge=0, le=2**53, description="Requested at or after this time, in milliseconds.")] | None
    ) = None


async def list_runs(api: Api, caller: Caller, request: ListRuns) -> Answer:
    """The account's runs, newest first. `next` continues the list."""
    await checks.shown(api, request.after)
    page = await view.list_page(
        api.views,
        caller.account,
        limit=request.limit,
        cursor=request.cursor,
        session=request.session,
        status=request.status,
        agent=request.agent,
        parent=request.parent,
        root=request.root,
        since=request.since,
    )
    return Answer(body=page, seq=page.position)


class GetRun(Read, frozen=True, kw_only=True):
    run: str


async def get_run(api: Api, caller: Caller, request: GetRun) -> Answer:
    """A run as the views show it; also while it runs."""
    await checks.shown(api, request.after)

    async def look() -> view.RunView | None:
        return (await view.get(api.views, caller.account, request.run))[0]

    found = await _find(api, caller, request.run, look)
    return Answer(body=found, seq=found.seq)


class ReadSteps(Read, frozen=True, kw_only=True):
    run: str


async def read_steps(api: Api, caller: Caller, request: ReadSteps) -> Answer:
    """The run's waterfall: model calls, tools, waits for a person and sub-agents, with begin, end, usage."""
    await checks.shown(api, request.after)

    async def look() -> steps_view.Steps | None:
        return await steps_view.list_for(api.views, caller.account, request.run)

    found = await _find(api, caller, request.run, look)
    return Answer(body=found, seq=found.position)


async def _find(api: Api, caller: Caller, run: str, look: Callable[[], Awaitable[T | None]]) -> T:
    """What the views have of a run. Before it is called missing the log is asked; what is there is waited for."""
    key, n = checks.run_key(caller, run)
    found = await look()
    if found is None:
        await checks.shown(api, (await _session_of(api, key, n)).seq)
        found = await look()
    if found is None:
        raise Problem("projection_behind", f"the views do not show run {run} yet")
    return found


async def _session_of(api: Api, key: SessionKey, n: int) -> Session:
    session = await api.sessions.load(key)
    if not session.exists or not 0 < n <= session.last_run:
        raise checks.no_run(key.run(n))
    return session


class WaitRun(Request, frozen=True, kw_only=True):
    run: str
    timeout: Annotated[float, Meta(ge=0, le=checks.WAIT_MAX, description="Seconds.")] = 30.0


class Waited(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run by the log itself. `outcome` is there if it has ended; where it has not, `status` is `queued`, `running`
    or `waiting`: for a person, if `requests` says for what, else for its sub-agents. `seq` is the sequence that this
    reflects."""

    run: str
    session: str | None
    """None: it was deleted, and its runs were kept."""
    status: RunStatus
    seq: int
    outcome: Outcome | None = None
    requests: tuple[OpenRequest, ...] = ()


async def wait_run(api: Api, caller: Caller, request: WaitRun) -> Answer:
    """Waits for the run's end, and answers with its state if that does not come in time. A run that waits for a person
    is answered with at once."""
    key, n = checks.run_key(caller, request.run)
    session = await api.sessions.load(key)
    if session.deleted and session.deleted.mode == "detach":
        return await _kept(api, caller, session, request.run)
    session = await _session_of(api, key, n)
    stands = await standing_of(api, session, n, request.timeout, after=0)
    body = Waited(
        run=request.run,
        session=key.session,
        status=stands.status,
        seq=stands.seq,
        outcome=stands.outcome,
        requests=stands.requests,
    )
    return Answer(body=body, seq=stands.seq)


async def _kept(api: Api, caller: Caller, session: Session, run: str) -> Answer:
    """How a run ended whose session is deleted and which is kept: only the views say that still."""
    await checks.shown(api, session.seq)
    found, _ = await view.get(api.views, caller.account, run)
    if found is None:
        raise checks.no_run(run)
    outcome = Outcome(
        status=found.status,
        seq=found.seq,
        output=found.output or "",
        reasoning=found.reasoning,
        blob=found.blob,
        note=found.note,
        error=found.error,
        reason=found.reason,
        usage=found.usage,
        model=found.model,
    )
    return Answer(
        body=Waited(run=run, session=None, status=found.status, seq=found.seq, outcome=outcome), seq=found.seq
    )


class CancelRun(Request, frozen=True, kw_only=True):
    run: str
    reason: Annotated[str, Meta(max_length=1024)] = ""
    expected_seq: ExpectedSeq | None = None


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """`requested`: the run goes on until its runner sees it. `cancelled`: it has ended by this. `ended`: it had ended
    before, and nothing has changed."""

    run: str
    session: str
    state: Literal["requested", "cancelled", "ended"]
    seq: int


async def cancel_run(api: Api, caller: Caller, request: CancelRun) -> Answer:
    """Cancels a run: one that waits ends at once, one that runs as soon as its runner sees it (202)."""
    key, n = checks.run_key(caller, request.run)
    body = msgspec.structs.replace(request, expected_seq=None)
    origin = api.origin(caller, "cancel_run", body, expected_seq=request.expected_seq)
    handled = await api.cancel(key, CancelCommand(origin=origin, run=n, reason=request.reason))
    session, recorded = handled.session, handled.recorded
    receipt = None if recorded else session.receipt(origin.idempotency_key)
    if receipt:
        recorded = await api.log.at(key, receipt.seq)
    match recorded.event.data if recorded else None:
        case RunCancelRequested():
            state = "requested"
        case RunEnded():
            state = "cancelled"
        case _:
            state = "requested" if session.run(n) else "ended"
    seq = recorded.seq if recorded else session.seq
    return Answer(
        body=Cancelled(run=request.run, session=key.session, state=state, seq=seq),
        status=202 if state == "requested" and not receipt else 200,
        seq=seq,
        replayed=receipt is not None,
    )
