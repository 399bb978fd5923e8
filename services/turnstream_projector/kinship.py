"""What sessions say of each other: a child was intended, opened, and its end was told to whoever delegated it.

Held against each other once the whole log is read. What somebody has still to do is no finding: an intent whose run is
being carried out, a child that is to be ended, an end that is to be told. Nothing is asked of what is deleted, nor of a
fork that is not whole: the children that it tells of are another's."""

from collections.abc import Collection, Mapping

from turnstream.ids import SessionKey
from turnstream.session.events import Parent
from turnstream.session.state import Child, Session
from turnstream_projector.findings import Findings


def check(sessions: Mapping[SessionKey, Session], told: Collection[SessionKey], findings: Findings) -> None:
    """`told`: the children who say that their end was told."""
    for key, session in sessions.items():
        if session.deleted or session.copying:
            continue
        if session.parent:
            _check_child(key, session, session.parent, sessions, told, findings)
        for child in session.children:
            if _is_followed(session, child) and SessionKey(key.account, child.session) not in sessions:
                message = f"run {key.run(child.run)} has delegated to it, and it was never opened"
                findings.add("child_missing", child.session, None, message, SessionKey(key.account, child.session))


def _is_followed(session: Session, child: Child) -> bool:
    """Whether something has come behind the intent that cannot come before the child is there."""
    run = session.run(child.run)
    if run is None:
        return not child.cancel
    call = run.call(child.call_id)
    return call is None or call.request > 0


def _check_child(
    key: SessionKey,
    session: Session,
    parent: Parent,
    sessions: Mapping[SessionKey, Session],
    told: Collection[SessionKey],
    findings: Findings,
) -> None:
    above = SessionKey(key.account, parent.session)
    delegator = sessions.get(above)
    if delegator is not None and delegator.deleted:
        return
    if delegator is None or dict(delegator.delegated).get(parent.run, 0) < parent.k:
        findings.add("no_such_child", key, None, f"run {above.run(parent.run)} has never delegated to it", above)
        return
    waits = delegator.child(parent.run, parent.k) is not None
    if waits and key in told:
        findings.add("child_untold", key, None, f"its end is told to {above.run(parent.run)}, who does not know", key)
    elif not waits and session.run(1) is not None:
        findings.add("child_untold", key, None, f"{above.run(parent.run)} knows an end of it, and it has none", key)
