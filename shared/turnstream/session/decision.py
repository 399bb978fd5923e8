"""What a decision is, and what every decision needs: the event made of a command, whom to wake, what falls due."""

import msgspec

from turnstream.session.commands import Command
from turnstream.session.errors import Rejected
from turnstream.session.events import Due, Event, Fact, Leftover, RunEnded
from turnstream.session.state import Request, Run, Session


class Decision(msgspec.Struct, frozen=True):
    """What to store, and what it asks of others: queues to wake, and what falls due when."""

    event: Event
    wakes: tuple[str, ...] = ()
    dues: tuple[Due, ...] = ()
    settled: tuple[str, ...] = ()
    """What earlier events said falls due, and no longer does."""


def event_of(command: Command, session: Session, data: Fact) -> Event:
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


def wakes_without(session: Session, run: Run, ended: RunEnded | None = None) -> tuple[str, ...]:
    """The queues of the runs that may start once this one is out of the way: of those in line, the one that it leaves
    over is the first, if nothing has interrupted it."""
    rest = msgspec.structs.replace(session, runs=tuple([other for other in session.runs if other is not run]))
    first = ended.leftover if ended and ended.leftover and not rest.place_of_leftover(run.n) else None
    # Whoever looks after the session ends the run's children, and tells whom the session was made for.
    others = [session.last_queue] if session.parent or any(child.run == run.n for child in session.children) else []
    started = [first.spec.queue] if first else _newly_startable(session, rest)
    return tuple(dict.fromkeys([*started, *others]))


def wakes_answered(session: Session, run: Run, closed: int) -> tuple[str, ...]:
    """The queues that have something to do once so many requests of the run, that people answer, are closed."""
    if closed == len(run.requests):
        return (run.spec.queue,)
    return wakes_parked(session, run) if closed == len(run.for_people) else ()


def wakes_parked(session: Session, run: Run) -> tuple[str, ...]:
    """The queues of the runs that may start once this one waits for its children alone."""
    parked = msgspec.structs.replace(run, status="waiting", parked=True)
    runs = tuple([parked if other is run else other for other in session.runs])
    return tuple(dict.fromkeys(_newly_startable(session, msgspec.structs.replace(session, runs=runs))))


def _newly_startable(before: Session, after: Session) -> list[str]:
    known = {run.n for run in before.startable}
    return [run.spec.queue for run in after.startable if run.n not in known]
