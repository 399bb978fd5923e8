"""How it goes: what is in the broker's streams and consumers, how far the views are, what runs."""

import msgspec

from turnstream import subjects
from turnstream.session.events import RunStatus
from turnstream.views import live_runs, runs
from turnstream_api.api import Answer, Api, Caller
from turnstream_api.operation import Request

SHOWN = 200
"""Runs that the overview looks at."""
OLD = 60_000
"""Milliseconds after which a run that has not ended is shown by itself."""


class Nothing(Request, frozen=True, kw_only=True):
    """No fields."""


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    subjects: int
    consumers: int
    replicas: int
    leader: str | None


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[StreamState, ...]


async def streams(api: Api, caller: Caller, request: Nothing) -> Answer:
    """The broker's streams."""
    items = [await _stream(api, stream.name) for stream in subjects.STREAMS]
    return Answer(body=Streams(items=tuple(items)))


class ConsumerState(msgspec.Struct, frozen=True, kw_only=True):
    """`pending`: messages not taken yet. `unacknowledged`: taken and not done with. `behind`: sequences between the
    stream's end and the oldest message that is not done with."""

    stream: str
    name: str
    pending: int
    unacknowledged: int
    redelivered: int
    waiting: int
    behind: int
    last_active: str | None
    oldest_at: str | None
    """When the oldest message that is not done with was stored."""


class Consumers(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[ConsumerState, ...]


async def consumers(api: Api, caller: Caller, request: Nothing) -> Answer:
    """The durable consumers of the streams: dispatch, the inbox, the runners of each queue."""
    items: list[ConsumerState] = []
    for stream in (subjects.SESSIONS, subjects.WORK, subjects.INBOX):
        last = (await _stream(api, stream)).last_seq
        items += await _consumers(api, stream, last)
    return Answer(body=Consumers(items=tuple(items)))


class ViewsState(msgspec.Struct, frozen=True, kw_only=True):
    """`position`: the last event that the views show; `behind`: sequences from there to the log's end."""

    generation: int
    position: int
    last_seq: int
    behind: int


async def views(api: Api, caller: Caller, request: Nothing) -> Answer:
    """How far the views are."""
    return Answer(body=await _views(api))


class OldRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has been queued, or running, since `since` (milliseconds)."""

    run: str
    status: RunStatus
    since: int


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """`runs`, `runners` and `old_runs` are of the caller's account: how many have not ended, who carries them out,
    which of them have been as they are for more than a minute."""

    account: str
    runs: live_runs.LiveRuns
    views: ViewsState
    pending_wakeups: int
    pending_inbox: int
    refused: int
    agents: tuple[str, ...]
    runners: tuple[str, ...]
    old_runs: tuple[OldRun, ...]


async def overview(api: Api, caller: Caller, request: Nothing) -> Answer:
    """The whole at a glance."""
    body = Overview(
        account=caller.account,
        runs=await live_runs.count_live(api.views, caller.account),
        views=await _views(api),
        pending_wakeups=(await _stream(api, subjects.WORK)).messages,
        pending_inbox=(await _stream(api, subjects.INBOX)).messages,
        refused=(await _stream(api, subjects.REFUSED)).messages,
        agents=tuple(api.roster.listed(caller.account)),
        runners=await _runners(api, caller.account),
        old_runs=await _old_runs(api, caller.account),
    )
    return Answer(body=body)


async def _runners(api: Api, account: str) -> tuple[str, ...]:
    page = await runs.list_page(api.views, account, status="running", limit=SHOWN)
    return tuple(sorted({run.starts[-1].runner for run in page.items if run.starts}))


async def _old_runs(api: Api, account: str) -> tuple[OldRun, ...]:
    found = await live_runs.live_before(api.views, api.now() - OLD, limit=SHOWN, account=account)
    return tuple(
        OldRun(run=one.key.run(one.row.n), status=one.row.status, since=one.row.live_since or 0) for one in found
    )


# --- what JetStream says ------------------------------------------------------------------------------------------


class _Position(msgspec.Struct):
    stream_seq: int
    last_active: str | None = None


class _ConsumerConfig(msgspec.Struct):
    durable_name: str = ""


class _ConsumerInfo(msgspec.Struct):
    name: str
    config: _ConsumerConfig
    ack_floor: _Position
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0
    num_pending: int = 0


class _ConsumerList(msgspec.Struct):
    total: int
    consumers: list[_ConsumerInfo] | None = None


async def _stream(api: Api, name: str) -> StreamState:
    info = await api.broker.stream(name)
    state = info.state
    return StreamState(
        name=name,
        messages=state.messages,
        bytes=state.bytes,
        first_seq=state.first_seq,
        last_seq=state.last_seq,
        subjects=state.num_subjects,
        consumers=state.consumer_count,
        replicas=info.config.num_replicas,
        leader=info.cluster.leader if info.cluster else None,
    )


async def _consumers(api: Api, stream: str, last: int) -> list[ConsumerState]:
    found: list[ConsumerState] = []
    offset = 0
    while True:
        answer = msgspec.convert(await api.broker.api(f"CONSUMER.LIST.{stream}", {"offset": offset}), _ConsumerList)
        page = answer.consumers or []
        found += [await _consumer(api, stream, info, last) for info in page if info.config.durable_name]
        offset += len(page)
        if not page or offset >= answer.total:
            return found


async def _consumer(api: Api, stream: str, info: _ConsumerInfo, last: int) -> ConsumerState:
    busy = info.num_pending or info.num_ack_pending
    return ConsumerState(
        stream=stream,
        name=info.name,
        pending=info.num_pending,
        unacknowledged=info.num_ack_pending,
        redelivered=info.num_redelivered,
        waiting=info.num_waiting,
        behind=max(0, last - info.ack_floor.stream_seq) if busy else 0,
        last_active=info.ack_floor.last_active,
        oldest_at=await _stored_at(api, stream, info.ack_floor.stream_seq + 1) if busy else None,
    )


async def _stored_at(api: Api, stream: str, seq: int) -> str | None:
    """When the first message at or behind this sequence was stored."""
    found = await api.broker.message(stream, {"seq": seq, "next_by_subj": ">"})
    return found and found.time


async def _views(api: Api) -> ViewsState:
    checkpoint = await api.views.checkpoint()
    last = (await _stream(api, subjects.SESSIONS)).last_seq
    return ViewsState(
        generation=checkpoint.generation,
        position=checkpoint.position,
        last_seq=last,
        behind=max(0, last - checkpoint.position),
    )
