"""The runner service: dispatch and runners on one connection, wired together. Nothing is decided here. Its web page
lists the sessions that cannot be driven (`/stuck`).

At shutdown no new wake-ups are taken and runs are given back; dispatch goes on until then, so that what was given back
is taken up by others at once.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.pages import application
from turnstream.broker.pull import Pull
from turnstream.broker.service import connect, first, unless
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.known import KEEP_BYTES, Known
from turnstream.log.snapshots import Snapshotter
from turnstream.roster import Names, Roster
from turnstream.settings import Settings
from turnstream.specs import agents_of, specs_of
from turnstream.telemetry import metrics
from turnstream.wire.agents import SavedAgents
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream.wire.checkpoints import Checkpoints
from turnstream.wire.live import Live
from turnstream.wire.snapshots import Snapshots
from turnstream.wire.timers import Timers
from turnstream.wire.work import Work
from turnstream_runner import dispatch
from turnstream_runner.copying import Copier
from turnstream_runner.dispatch import Dispatch
from turnstream_runner.equipment import Equipment
from turnstream_runner.erase import Eraser
from turnstream_runner.leases import Leases
from turnstream_runner.mcp.servers import Servers
from turnstream_runner.models.registry import Models
from turnstream_runner.roles import Roles
from turnstream_runner.room import Room
from turnstream_runner.runner import Runner
from turnstream_runner.tools.registry import Tools


async def serve(
    settings: Settings,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None] | None = None,
    known: Known | None = None,
) -> None:
    """Runs until `stop` is set; calls `ready` once it takes work. What an API of the same process knows of sessions is
    in `known`.

    Raises `AgentsError` for definitions that cannot be used, `BrokerFault` where streams cannot be made as declared.
    """
    all_agents = agents_of(settings)
    async with AsyncExitStack() as stack:
        consumers = (subjects.DISPATCH, *(subjects.runner_consumer(queue, settings.lease) for queue in settings.queues))
        connecting = connect(settings, name="turnstream-runner", monotonic=time.monotonic, consumers=consumers)
        broker = await unless(stop, connecting)
        if broker is None:
            return
        stack.push_async_callback(broker.close)
        models = Models(settings.models)
        stack.push_async_callback(models.close)
        await models.prepare(agent.model for agent in all_agents)
        servers = Servers()
        stack.push_async_callback(servers.close)
        if any(agent.mcp for agent in all_agents):
            await servers.prepare()
        names = Names()
        roster = Roster(all_agents, specs_of(settings, all_agents), settings, SavedAgents(broker), names)
        equipment = _equipment(settings, broker, roster, servers, models, known or Known(keep_bytes=KEEP_BYTES))
        stack.push_async_callback(equipment.sessions.close)
        leases = Leases(settings.lease, time.monotonic, lambda: broker.nc.is_connected)
        runner = Runner(equipment, leases, nonce=lambda: secrets.token_hex(8))
        carrier = Dispatch(Pull(broker, subjects.DISPATCH, slots=dispatch.SLOTS), Work(broker), Timers(broker))
        pages = {"/stuck": lambda: msgspec.json.encode({"items": list(runner.stuck)})}
        await stack.enter_async_context(application(broker, settings.health_host, settings.health_port, pages))
        await _work(settings, broker, runner, carrier, names, stop, ready)


def _equipment(
    settings: Settings, broker: Broker, roster: Roster, servers: Servers, models: Models, known: Known
) -> Equipment:
    log = JetStreamLog(broker, append_timeout=settings.append_timeout, tombstone=settings.tombstone)
    sessions = Sessions(
        log,
        now=broker.clock.now,
        known=known,
        snapshots=Snapshotter(log, Snapshots(broker)),
        on_append=metrics.appended,
        on_conflict=metrics.conflicts.inc,
    )
    broker.on_reconnect(sessions.forget)
    blobs = Blobs(broker)
    return Equipment(
        runner=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
        sessions=sessions,
        roles=Roles(roster, Tools(roster.local.tools)),
        roster=roster,
        servers=servers,
        models=models,
        work=Work(broker),
        live=Live(broker),
        blobs=blobs,
        checkpoints=Checkpoints(broker),
        eraser=Eraser(broker, log, settings.runner_slots, tombstone=settings.tombstone),
        copier=Copier(sessions, blobs, Attachments(broker, blobs), settings.runner_slots),
        room=Room(settings.event_max),
        now=broker.clock.now,
    )


async def _work(
    settings: Settings,
    broker: Broker,
    runner: Runner,
    carrier: Dispatch,
    names: Names,
    stop: asyncio.Event,
    ready: Callable[[], None] | None,
) -> None:
    """Carries and drives until `stop` is set, or until a part of it fails: then its error is raised."""
    following = asyncio.create_task(names.follow(broker), name="saved agents")
    stopped = asyncio.create_task(stop.wait())
    await first(stopped, asyncio.create_task(names.wait_loaded()), following)
    pulls = {
        queue: Pull(broker, subjects.runner_consumer(queue, settings.lease), slots=settings.runner_slots)
        for queue in settings.queues
    }
    taking = [asyncio.create_task(runner.run(queue, pull), name=f"queue {queue}") for queue, pull in pulls.items()]
    beside = [
        following,
        asyncio.create_task(carrier.run(), name="dispatch"),
        asyncio.create_task(runner.leases.keep(), name="leases"),
    ]
    try:
        if ready:
            ready()
        await first(stopped, *taking, *beside)
    finally:
        stopped.cancel()
        runner.stop_taking()
        for pull in pulls.values():
            await pull.close()
        await asyncio.gather(*taking, return_exceptions=True)
        await runner.drain(settings.drain_grace)
        await carrier.close()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
