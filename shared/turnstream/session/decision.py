"""What a decision is, and what every decision needs: the event made of a command, whom to wake, what falls due."""

import msgspec

from turnstream.session.commands import Command
from turnstream.session.errors import Rejected
from turnstream.session.events import Due, Error, Event, Fact, Leftover, Recorded, RunEnded, Unknown
from turnstream.session.fold import evolve
from turnstream.session.state import Request, Run, Session

DISCONNECTED = Error(code="client_disconnected", message="client disconnected mid-stream")
"""Why a run fails whose client went away."""


class Decision(msgspec.Struct, frozen=True):
    """What to store, and what it asks of others: queues to wake, and what falls due when."""

    event: Event
    wakes: tuple[str, ...] = ()
    dues: tuple[Due, ...] = ()
    settled: tuple[str, ...] = ()
    """What earlier events said falls due, and no longer does."""


def event_of(command: Command, session: Session, data: Fact | Unknown) -> Event:
    origin = command.origin
    return Event(
        id=origin.id,
        key=session.key,
        data=data,
        actor=origin.actor,
        time=origin.time,
        cause=origin.cause,
        correlation=origin.correlation,
        idempotency_key=origin.idempotency_key,
        body_digest=origin.body_digest,
        traceparent=origin.traceparent,
    )


def no_session(session: Session) -> Rejected:
    """Why there is none, of one that does not exist."""
    name = session.key.session
    if session.deleted is None:
        return Rejected("not_found", f"no session {name}")
    if session.deleted.mode == "detach":
        return Rejected("not_found", f"session {name} was deleted; its runs stay readable, and its id stays taken")
    free = "the id of an erased session is free again once its tombstone has expired"
    return Rejected("not_found", f"session {name} was deleted; {free}")


def live(session: Session, n: int) -> Run:
    """The run, which has not ended. Raises `Rejected`."""
    run = session.run(n)
    if run is not None:
        return run
    if 0 < n <= session.last_run:
        raise Rejected("invalid_transition", f"run {session.key.run(n)} has ended", run=session.key.run(n))
    raise Rejected("not_found", f"no run {session.key.run(n)}")


def no_edge(session: Session, run: Run, event: str) -> Rejected:
    name = session.key.run(run.n)
    state = f"{run.status}, cancel requested" if run.cancel else run.status
    return Rejected("invalid_transition", f"run {name} is {state}: no {event} now", run=name)


def deadline(run: Run) -> str:
    """The name of the time at which a run is over."""
    return f"deadline-{run.n}"


def expiry(run: int, k: int) -> str:
    """The name of the time at which a request is over."""
    return f"expiry-{run}-{k}"


def expiries(run: Run) -> tuple[Request, ...]:
    return tuple([request for request in run.requests if request.expires_at is not None])


def settles(run: Run) -> tuple[str, ...]:
    """What no longer falls due once this run has ended."""
    mine = () if run.deadline is None else (deadline(run),)
    return (*mine, *(expiry(run.n, request.k) for request in expiries(run)))


def ending(session: Session, run: Run, ended: RunEnded) -> RunEnded:
    """The end, with everything that ends by it: its calls that have no result, and what is left over for the next
    run."""
    left = None
    if run.steering:
        left = Leftover(run=session.last_run + 1, spec=run.spec, message_ids=run.steering)
    return msgspec.structs.replace(
        ended,
        unfinished=tuple([call.id for call in run.open_calls]),
        leftover=left,
        usage=run.usage + ended.step_usage,
    )


def after(session: Session, event: Event) -> Session:
    """The session once this is stored."""
    return evolve(session, Recorded(seq=session.seq + 1, previous=session.seq, time=event.time, size=0, event=event))


def wakes(before: Session, then: Session) -> tuple[str, ...]:
    """The queues that have something to do now and had not before: those of the runs that may start, and that of
    whoever looks after the session if there is something to say to another one."""
    known = {run.n for run in before.startable}
    started = [run.spec.queue for run in then.startable if run.n not in known]
    others = [then.last_queue] if _between(then) - _between(before) else []
    return tuple(dict.fromkeys([*started, *others]))


def _between(session: Session) -> set[tuple[int, int]]:
    """What there is to say to other sessions: the children that are to end, and (0, 0), how this one has."""
    found = {(child.run, child.k) for child in session.children if child.cancel}
    return found | {(0, 0)} if session.unreported else found


def dues_parked(run: Run, then: Session) -> tuple[Due, ...]:
    """Its time goes on once it waits for nobody but its children."""
    parked = then.run(run.n)
    if parked is None or parked.deadline is None or run.deadline is not None or run.left is None:
        return ()
    return (Due(run.left, run.spec.queue, deadline(run)),)
