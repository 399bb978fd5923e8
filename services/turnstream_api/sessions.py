"""Sessions: open, list, look at, change; their events and their history."""

from contextlib import suppress
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from turnstream import ids
from turnstream.agents import context_of, lookup
from turnstream.ids import SessionKey
from turnstream.log import codec
from turnstream.log.base import PAGE
from turnstream.session import history, window
from turnstream.session.commands import OpenSession as OpenCommand
from turnstream.session.commands import UpdateSession as UpdateCommand
from turnstream.session.events import TYPES, PolicyData, Recorded, Spec
from turnstream.session.messages import Message
from turnstream.session.state import Session as Folded
from turnstream.session.window import Budget, budget_of
from turnstream.views import history as history_view
from turnstream.views import sessions as view
from turnstream_api import checks, policies
from turnstream_api.api import Answer, Api, Caller, Stream, written
from turnstream_api.checks import AgentName, Cursor, ExpectedSeq, Limit, Metadata, Seq, SessionId, TitleText
from turnstream_api.errors import Problem
from turnstream_api.frames import DELTA, Filter
from turnstream_api.operation import Read, Request
from turnstream_api.paging import read_after
from turnstream_api.policies import Policy

PAGE_BYTES = 512 * 1024
"""A page ends here even if it has fewer entries than asked for: a reply over NATS must fit one message."""
SCAN = 5000
"""Events that one page looks at: a filter that nothing fits must not read a whole session at once."""


class OpenSession(Request, frozen=True, kw_only=True):
    """Without `id` the session gets one from us."""

    id: SessionId | None = None
    title: TitleText | None = None
    agent: AgentName | None = None
    metadata: Metadata | None = None
    policy: Policy | None = None
    expected_seq: ExpectedSeq | None = None


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    created: bool
    seq: int


async def open_session(api: Api, caller: Caller, request: OpenSession) -> Answer:
    """Opens a session. One that is there stays as it is, but for the fields that are given."""
    if request.id is not None and not ids.may_open(request.id):
        raise Problem("invalid", "id: `--` is kept for the ids of child sessions", field="id")
    key = SessionKey(caller.account, request.id or api.session_id(caller, "open_session"))
    given = {name for name in ("title", "agent", "metadata", "policy") if getattr(request, name) is not None}
    opens = checks.opens(
        agent=await checks.agent(api, caller, request.agent),
        title=checks.title(request.title, "client"),
        metadata=checks.metadata(api, request.metadata),
        policy=policies.given(request.policy),
    )
    body = msgspec.structs.replace(request, expected_seq=None)
    origin = api.origin(caller, "open_session", body, expected_seq=request.expected_seq)
    fresh = request.id is None and caller.idempotency_key is None
    specs = api.agents(caller.account)
    handled = await api.handle(
        key, OpenCommand(origin=origin, opens=opens, given=frozenset(given), specs=specs), fresh=fresh
    )
    seq, replayed = written(handled, origin)
    recorded, opening = handled.recorded, handled.session.opening
    created = recorded.previous == 0 if recorded else replayed and opening is not None and opening[1].seq == seq
    answer = Opened(session=key.session, created=created, seq=seq)
    return Answer(body=answer, status=201 if created and recorded else 200, seq=seq, replayed=replayed)


class UpdateSession(Request, frozen=True, kw_only=True):
    """Whole values, never merged. A title given here is a person's: no automatic one replaces it."""

    session: str
    title: TitleText | None = None
    agent: AgentName | None = None
    metadata: Metadata | None = None
    policy: Policy | None = None
    expected_seq: ExpectedSeq | None = None


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    seq: int


async def update_session(api: Api, caller: Caller, request: UpdateSession) -> Answer:
    """Changes title, agent, metadata or policy of a session."""
    key = checks.session_key(caller, request.session)
    body = msgspec.structs.replace(request, expected_seq=None)
    origin = api.origin(caller, "update_session", body, expected_seq=request.expected_seq)
    command = UpdateCommand(
        origin=origin,
        title=checks.title(request.title, "user"),
        agent=await checks.agent(api, caller, request.agent),
        metadata=checks.metadata(api, request.metadata),
        policy=policies.given(request.policy),
    )
    handled = await api.sessions.handle(key, command)
    seq, replayed = written(handled, origin)
    return Answer(body=Updated(session=key.session, seq=seq), seq=seq, replayed=replayed)


class ListSessions(Read, frozen=True, kw_only=True):
    """`parent`: those that runs of this session have delegated to."""

    limit: Limit = 50
    cursor: Cursor | None = None
    status: view.Status | None = None
    agent: AgentName | None = None
    parent: Annotated[str, Meta(max_length=ids.SESSION_MAX)] | None = None
    q: Annotated[str, Meta(max_length=128, description="A part of the title.")] | None = None


async def list_sessions(api: Api, caller: Caller, request: ListSessions) -> Answer:
    """The account's sessions, by (updated_at, id), both descending. `next` continues the list. A list is as of its
    first page: each session that was there then comes once, in the order of then, wherever it has moved since, and is
    shown as it is now."""
    await checks.shown(api, request.after)
    page = await view.list_page(
        api.views,
        caller.account,
        limit=request.limit,
        cursor=request.cursor,
        status=request.status,
        agent=request.agent,
        parent=request.parent,
        q=request.q,
    )
    return Answer(body=page, seq=page.position)


class GetSession(Read, frozen=True, kw_only=True):
    session: str


class Session(view.SessionView, frozen=True, kw_only=True):
    """A session, for people and programs. Times are milliseconds since the epoch, by the broker's clock. `policy` is
    what was given for the session, `effective_policy` what is in force: every field, whoever gave it."""

    effective_policy: PolicyData


async def get_session(api: Api, caller: Caller, request: GetSession) -> Answer:
    """A session as the views show it, with the policy that is in force."""
    key = checks.session_key(caller, request.session)
    await checks.shown(api, request.after)
    found, _ = await view.get(api.views, key)
    if found is None:
        session = await api.sessions.load(key)  # the log knows whether it is there
        if not session.exists:
            raise checks.no_session(key.session)
        await checks.shown(api, session.seq)
        found, _ = await view.get(api.views, key)
    if found is None:
        raise Problem("projection_behind", f"the views do not show session {key.session} yet")
    policy = policies.in_force(api.settings, await api.spec(key.account, found.agent), found.policy)
    body = Session(**msgspec.structs.asdict(found), effective_policy=policies.shown(policy))
    return Answer(body=body, seq=found.seq)


STORED: Final = Meta(
    description="An event as it is stored, a CloudEvents record, with its sequence.",
    extra_json_schema={"type": "object", "required": ["seq", "id", "type", "source", "data"]},
)


class ReadEvents(Request, frozen=True, kw_only=True):
    """`after`: the last sequence that the caller has seen (0 or -1: none). `types`: event types, separated by
    commas."""

    session: str
    after: Annotated[int, Meta(ge=-1, le=2**53)] | None = None
    limit: Limit = 50
    types: Annotated[str, Meta(max_length=512)] | None = None
    deltas: bool = True


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Stored events, oldest first. `seq` is the last sequence that was looked at: the next page's `after`. `more`:
    there was more to read."""

    events: list[Annotated[msgspec.Raw, STORED]]
    seq: int
    more: bool


async def read_events(api: Api, caller: Caller, request: ReadEvents) -> Answer | Stream:
    """The session's events behind a sequence, by the log itself: a page as JSON, or with `Accept: text/event-stream` an
    open stream that goes on with what comes."""
    key = checks.session_key(caller, request.session)
    types = None if request.types is None else _types(request.types)
    # A browser that connects again asks for the same address; the header says how far it has come.
    after = max(0, request.after or 0 if caller.last_event_id is None else caller.last_event_id)
    session = await api.sessions.load(key)
    if not session.exists:
        raise checks.no_session(request.session)
    if caller.streams:
        deltas = request.deltas and (types is None or DELTA in types)
        return Stream(key=key, after=after, filter=Filter(types=types, deltas=deltas))
    if after > session.seq:  # ahead of the log, or of a read that lags
        after = min(after, await api.log.last(key))
    events: list[msgspec.Raw] = []
    size = looked = 0
    async for page in read_after(api.log, key, after, page=PAGE if types else request.limit):
        for recorded in page:
            if types is None or recorded.event.type in types:
                data = codec.public(recorded)
                size += len(data)
                if events and size > PAGE_BYTES:
                    return _page(events, after, more=True)
                events.append(msgspec.Raw(data))
            looked += 1
            after = recorded.seq
            if len(events) == request.limit or looked == SCAN:
                return _page(events, after, more=after < session.seq)
    return _page(events, after, more=False)


def _types(given: str) -> frozenset[str]:
    types = frozenset(given.split(","))
    if unknown := types - TYPES.keys() - {DELTA}:
        raise Problem("invalid", f"types: no such type: {', '.join(sorted(unknown))}"[:300], field="types")
    return types


def _page(events: list[msgspec.Raw], seq: int, *, more: bool) -> Answer:
    return Answer(body=EventPage(events=events, seq=seq, more=more), seq=seq)


class ReadHistory(Read, frozen=True, kw_only=True, rename={"form": "as"}):
    """`as=view` is the transcript, for people, by page; `as=model` is exactly what a model would get now."""

    session: str
    form: Literal["view", "model"] = "view"
    limit: Limit = 50
    cursor: Annotated[Seq, Meta(description="`next` of the page before.")] | None = None


class ModelHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a model would get now, oldest first: those of the run that is under way, if there is one."""

    messages: tuple[Message, ...]
    from_seq: Annotated[int, Meta(description="Sequence of the first event that is shown.")]
    tokens: Annotated[int, Meta(description="What the prompt has, with instructions and tools: counted or estimated.")]
    budget: Annotated[int | None, Meta(description="What it may have; null where nothing is known of the model.")]
    fits: Annotated[bool, Meta(description="Whether what has to be in it fits into it.")]
    seq: int


async def read_history(api: Api, caller: Caller, request: ReadHistory) -> Answer:
    """What was said in a session."""
    key = checks.session_key(caller, request.session)
    if request.form == "model":
        session = await api.sessions.load(key)
        if not session.exists:
            raise checks.no_session(request.session)
        return Answer(body=await _as_model(api, session), seq=session.seq)
    await checks.shown(api, request.after)
    after = request.cursor or 0
    page = await history_view.page(api.views, key, after, request.limit)
    if not page.items and not after and (session := await _unshown(api, key, page.position)):
        await checks.shown(api, session.seq)
        page = await history_view.page(api.views, key, after, request.limit)
    return Answer(body=_fit(page), seq=page.position)


async def _as_model(api: Api, session: Folded) -> ModelHistory:
    """By the run that holds the turn, else as one of the session's agent would begin now."""
    run = session.holder
    spec = run.spec if run else await api.spec(session.key.account, session.agent_name)
    policy = run.policy if run else policies.in_force(api.settings, spec, session.policy)
    budget = _budget(api, session, spec) if spec else None
    events = await _needed(api, session, window.needs(session, run, policy, budget))
    view = history.build(session, events, run.n if run else None, policy, budget)
    return ModelHistory(
        messages=view.messages,
        from_seq=view.since or (events[0].seq if events else 0),
        tokens=view.tokens,
        budget=budget.tokens if budget else None,
        fits=view.fits,
        seq=session.seq,
    )


async def _needed(api: Api, session: Folded, needs: window.Needs) -> list[Recorded]:
    """The events of which a window of the session, as it was read, is built."""
    beside = [await api.log.at(session.key, seq) for seq in needs.beside]
    _, events = await api.sessions.events(session.key, session.seq, needs.since)
    return [recorded for recorded in (*beside, *events) if recorded and recorded.seq <= session.seq]


def _budget(api: Api, session: Folded, spec: Spec) -> Budget | None:
    """What the last call of this model had; where there was none, what it has without instructions and tools."""
    if prompt := session.prompt(spec.model):
        return Budget(spec.model, prompt.window.budget, prompt.window.fixed)
    with suppress(LookupError):
        return budget_of(spec.model, context_of(lookup(spec.model, api.settings.models)))
    return None


async def _unshown(api: Api, key: SessionKey, position: int) -> Folded | None:
    """The session, if the views at `position` are behind it. Raises `Problem` where the log has none either."""
    session = await api.sessions.load(key)
    if not session.exists:
        raise checks.no_session(key.session)
    return session if session.seq > position else None


def _fit(page: history_view.HistoryPage) -> history_view.HistoryPage:
    """As many items as a page may have bytes, one at least."""
    size = 0
    for count, item in enumerate(page.items):
        size += len(msgspec.json.encode(item))
        if count and size > PAGE_BYTES:
            return history_view.HistoryPage(page.items[:count], page.items[count - 1].seq, page.position)
    return page
