"""Where a posted message goes: decided from the folded state and the policy, and written into the event. Never by a
model, never from what a text says.

    its author may not start a turn    nowhere: it is stored, and passed over
    a run waits, an approval is open   on_message.approval: reject · decline · parallel
    a run waits for an answer          on_message.question: answer · reject · queue · parallel
    a run is live                      on_busy: reject · queue · steer · interrupt · parallel
    a run waits for its children only  on_message.parked: interleave · queue · reject
    nothing is live                    the message starts a run

Steered or interrupted is the run that holds the turn (the first, where several do); where none does, the first in line,
which is about to start. No other run that waits for its turn is touched. A message that interrupts is the next behind
that run: before everything that was queued, before an earlier message that interrupted the same run, and before the
steering that the run leaves over.

What a person does by himself (`act`) is a turn of its own: it answers nothing, steers and interrupts nobody. Where a
message is not refused, and would not start beside a live run, it waits for its turn.
"""

from typing import Final, assert_never

import msgspec

from turnstream.ids import agent_id
from turnstream.session import answers
from turnstream.session.commands import Act, PostMessage
from turnstream.session.decision import Decision, after, dues_parked, event_of, expiries, expiry, wakes
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    NO_POLICY,
    Answered,
    Answers,
    MessagePosted,
    Queued,
    RunRequested,
    Spec,
    Starts,
    Steers,
    Title,
)
from turnstream.session.policy import Policy, merged, resolve
from turnstream.session.state import Run, Session, request_id

WAITING_MAX: Final = 1000
"""Messages that may wait in one session."""
ANSWERS_MAX: Final = 256 * 1024
"""Bytes of what one message answers, all questions together: it is one event."""


def post(command: PostMessage, session: Session) -> Decision:
    """Raises `Rejected`."""
    if not command.attachments and not any(part.text.strip() for part in command.content):
        message = "a message has something to say: its text is empty, and nothing is attached"
        raise Rejected("invalid", message, field="content")
    if session.messages.get(command.message_id) is not None or session.waits_with(command.message_id):
        raise Rejected("already_exists", f"a message {command.message_id} is there already", field="message_id")
    posted = MessagePosted(
        message_id=command.message_id,
        author=command.author,
        kind=command.kind,
        content=command.content,
        attachments=command.attachments,
        context=command.context,
        opens=None if session.exists else command.opens,
    )
    if command.kind == "notice":
        return Decision(event_of(command, session, posted))
    return _Route(command, session, posted).decide()


def act(command: Act, session: Session) -> Decision:
    """Raises `Rejected`."""
    agent, action = session.agent_name, command.action
    spec = command.specs.get(agent)
    if spec is None:
        raise _no_agent(agent)
    tools = command.tools.get(agent, {})
    if action.name not in tools:
        known = ", ".join(sorted(tools)) or "none"
        message = f"agent {agent} has no tool {action.name[:64]} that a person can call; there are: {known}"
        raise Rejected("not_found", message, field="verb")
    answers.check(msgspec.json.decode(action.arguments), tools[action.name], (), "arguments")
    spec = msgspec.structs.replace(spec, policy=merged(spec.policy, session.policy))
    policy = resolve(spec.policy)
    if not policy.may_start(command.author):
        message = f"author: by the session's policy (`starters`) {command.author} may not start a turn"
        raise Rejected("invalid", message, field="author")
    queued = _acts_later(session, policy)
    _find_room(session)
    data = RunRequested(
        run=session.last_run + 1, spec=spec, trigger="action", action=action, author=command.author, queued=queued
    )
    return Decision(event_of(command, session, data), wakes=() if queued else (spec.queue,))


def check_title(title: Title | None, policy: Policy) -> None:
    """Raises `Rejected` for a client's title where only a person may give one."""
    if title and title.source == "client" and policy.titles == "none":
        message = "title: the session's policy (`titles`) takes none but a person's, who changes the session"
        raise Rejected("invalid", message, field="title")


def _acts_later(session: Session, policy: Policy) -> bool:
    """Whether an action has to wait for its turn. Raises `Rejected`."""
    if not session.live:
        return waits_for_parked(session, policy)
    if policy.on_busy == "reject":
        raise _is_active(session, "an action meanwhile")
    return policy.on_busy != "parallel"


def waits_for_parked(session: Session, policy: Policy) -> bool:
    """Whether something that comes while runs wait for their children alone has to wait for them. Raises
    `Rejected`."""
    if not session.runs:
        return False
    if policy.on_message_parked == "reject":
        run = session.key.run(session.runs[0].n)
        message = f"run {run} waits for its sub-agents, and the session refuses everything meanwhile"
        raise Rejected("run_active", message, run=run)
    return policy.on_message_parked == "queue"


def _is_active(session: Session, what: str) -> Rejected:
    """Why a session with a live run refuses something."""
    front = session.front
    assert front is not None
    run = session.key.run(front.n)
    return Rejected("run_active", f"run {run} is not ended, and the session refuses {what}", run=run)


def _find_room(session: Session) -> None:
    if session.waiting >= WAITING_MAX:
        run = session.key.run((session.holder or session.runs[0]).n)
        message = f"{WAITING_MAX} messages wait behind run {run} already; say it again when some are done"
        raise Rejected("run_active", message, run=run)


def _no_agent(name: str) -> Rejected:
    return Rejected("agent_not_found", f"no agent {name}", field="agent")


class _Route:
    """One message on its way; each method is one way that it can go."""

    def __init__(self, command: PostMessage, session: Session, posted: MessagePosted) -> None:
        self.command = command
        self.session = session
        self.posted = posted
        opens = None if session.exists else command.opens
        self.own_policy = opens.policy if opens else session.policy
        self.agent = command.agent or (opens.agent if opens else None) or session.agent_name
        self.known = command.specs.get(self.agent)
        if self.known is None and command.agent:
            raise _no_agent(self.agent)
        given = self.known.policy if self.known else NO_POLICY
        if command.policy.on_busy and resolve(given, self.own_policy).message_on_busy == "refuse":
            raise Rejected("invalid", "on_busy: the session does not let a message say that itself", field="on_busy")
        self.policy: Policy = resolve(given, self.own_policy, command.policy)
        check_title(opens.title if opens else None, self.policy)

    def decide(self) -> Decision:
        opens = self.posted.opens
        delegated = opens is not None and opens.parent is not None
        if not delegated and not self.policy.may_start(self.command.author):
            return self._decision()
        live = self.session.live
        if not live:
            return self._queued() if waits_for_parked(self.session, self.policy) else self._starts()
        waiting = next((run for run in live if run.for_people), None)
        if waiting is None or waiting.is_to_end:
            return self._busy()
        if any(request.kind == "approval" for request in waiting.requests):
            match self.policy.on_message_approval:
                case "reject":
                    raise self._waits(waiting)
                case "decline":
                    return self._declines(waiting)
                case "parallel":
                    return self._starts()
        match self.policy.on_message_question:
            case "answer":
                return self._answers(waiting)
            case "reject":
                raise self._waits(waiting)
            case "queue":
                return self._queued()
            case "parallel":
                return self._starts()

    def _busy(self) -> Decision:
        front = self.session.front
        assert front is not None
        match self.policy.on_busy:
            case "reject":
                what = "a second message"
                if self.policy.message_on_busy == "allow":
                    what += "; `on_busy` (queue, steer, interrupt, parallel) says what else becomes of it"
                raise _is_active(self.session, what)
            case "queue":
                return self._queued()
            case "steer":
                return self._steers(front)
            case "interrupt":
                return self._queued(interrupts=front)
            case "parallel":
                return self._starts()
            case _:
                assert_never(self.policy.on_busy)

    # --- the ways ---------------------------------------------------------------------------------------------------

    def _starts(self) -> Decision:
        _find_room(self.session)
        starts = Starts(run=self.session.last_run + 1, spec=self._spec())
        return self._decision(starts=starts, woken=(starts.spec.queue,))

    def _queued(self, interrupts: Run | None = None) -> Decision:
        _find_room(self.session)
        n = interrupts.n if interrupts else 0
        queued = Queued(run=self.session.last_run + 1, spec=self._spec(), interrupts=n)
        return self._decision(queued=queued, woken=(interrupts.spec.queue,) if interrupts else ())

    def _steers(self, run: Run) -> Decision:
        """Only what is for this very run: another author's message, where that matters, or one for another agent or
        model, waits for its turn. So does what comes to an action or a graph: neither has a next word to carry it."""
        mine = (None, run.spec.agent, agent_id(run.spec.agent, run.spec.version))
        other = self.command.agent not in mine or self.command.model
        if other or run.trigger == "action" or run.spec.graph or self._is_foreign(run):
            return self._queued()
        _find_room(self.session)
        return self._decision(steers=Steers(run=run.n))

    def _answers(self, run: Run) -> Decision:
        if self._is_foreign(run):
            return self._queued()
        self._take_no_agent()
        self._in_time(run)
        text = "\n".join(part.text for part in self.command.content)
        size = len(msgspec.json.encode(text)) * len(run.for_people)
        if size > ANSWERS_MAX:
            message = (
                f"content: {size} bytes as the answer to {len(run.for_people)} questions, {ANSWERS_MAX} are allowed"
            )
            raise Rejected("invalid", message, field="content")
        said = tuple(
            Answered(
                request=request_id(self.session, run.n, request.k),
                answer=answers.read(text, request.schema, request.choices),
            )
            for request in run.for_people
        )
        return self._closes(run, said)

    def _declines(self, run: Run) -> Decision:
        if self._is_foreign(run):
            return self._queued()
        self._take_no_agent()
        self._in_time(run)
        said = tuple(
            Answered(request=request_id(self.session, run.n, request.k), declined=True)
            for request in run.requests
            if request.kind == "approval"
        )
        return self._closes(run, said)

    def _closes(self, run: Run, said: tuple[Answered, ...]) -> Decision:
        names = {one.request for one in said}
        settled = tuple(
            expiry(run.n, request.k) for request in expiries(run) if request_id(self.session, run.n, request.k) in names
        )
        decision = self._decision(answers=Answers(run=run.n, requests=said), settled=settled)
        then = after(self.session, decision.event)
        return msgspec.structs.replace(decision, wakes=wakes(self.session, then), dues=dues_parked(run, then))

    # --- what they need ---------------------------------------------------------------------------------------------

    def _decision(
        self,
        *,
        woken: tuple[str, ...] = (),
        settled: tuple[str, ...] = (),
        starts: Starts | None = None,
        queued: Queued | None = None,
        steers: Steers | None = None,
        answers: Answers | None = None,
    ) -> Decision:
        data = msgspec.structs.replace(self.posted, starts=starts, queued=queued, steers=steers, answers=answers)
        return Decision(event_of(self.command, self.session, data), woken, settled=settled)

    def _spec(self) -> Spec:
        """What the run carries out, with everything pinned that was said about it."""
        if self.known is None:
            raise _no_agent(self.agent)
        policy = merged(self.known.policy, self.own_policy)
        model = self.command.model or self.known.model
        return msgspec.structs.replace(self.known, model=model, policy=policy)

    def _is_foreign(self, run: Run) -> bool:
        return self.policy.authors == "single" and self.command.author != run.author

    def _take_no_agent(self) -> None:
        for field, value in (("agent", self.command.agent), ("model", self.command.model)):
            if value:
                message = f"{field}: this message answers a run that is there, and starts none"
                raise Rejected("invalid", message, field=field)

    def _in_time(self, run: Run) -> None:
        for request in expiries(run):
            if request.expires_at is not None and self.command.origin.time >= request.expires_at:
                name = request_id(self.session, run.n, request.k)
                raise Rejected("request_expired", f"the time of request {name} is over", request=name)

    def _waits(self, run: Run) -> Rejected:
        name = self.session.key.run(run.n)
        asked = ", ".join(request_id(self.session, run.n, request.k) for request in run.for_people)
        return Rejected("run_waiting", f"run {name} waits for an answer to {asked}", run=name)
