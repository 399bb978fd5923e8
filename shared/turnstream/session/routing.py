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
"""

from typing import Final, assert_never

import msgspec

from turnstream.session import answers
from turnstream.session.commands import PostMessage
from turnstream.session.decision import Decision, event_of, expiries, expiry, wakes_answered
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    NO_POLICY,
    Answered,
    Answers,
    MessagePosted,
    Queued,
    Spec,
    Starts,
    Steers,
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
            raise self._no_agent()
        given = self.known.policy if self.known else NO_POLICY
        if command.policy.on_busy and resolve(given, self.own_policy).message_on_busy == "refuse":
            raise Rejected("invalid", "on_busy: the session does not let a message say that itself", field="on_busy")
        self.policy: Policy = resolve(given, self.own_policy, command.policy)

    def decide(self) -> Decision:
        opens = self.posted.opens
        delegated = opens is not None and opens.parent is not None
        if not delegated and not self.policy.may_start(self.command.author):
            return self._decision()
        live = self.session.live
        if not live:
            return self._beside_parked() if self.session.runs else self._starts()
        waiting = next((run for run in live if run.for_people), None)
        if waiting is None or waiting.is_to_end:
            return self._busy(live)
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

    def _beside_parked(self) -> Decision:
        match self.policy.on_message_parked:
            case "interleave":
                return self._starts()
            case "queue":
                return self._queued()
            case "reject":
                run = self.session.key.run(self.session.runs[0].n)
                message = f"run {run} waits for its sub-agents, and the session refuses a message meanwhile"
                raise Rejected("run_active", message, run=run)
            case _:
                assert_never(self.policy.on_message_parked)

    def _busy(self, live: tuple[Run, ...]) -> Decision:
        front = self.session.holder or live[0]
        match self.policy.on_busy:
            case "reject":
                run = self.session.key.run(front.n)
                message = f"run {run} is not ended, and the session refuses a second message"
                if self.policy.message_on_busy == "allow":
                    message += "; `on_busy` (queue, steer, interrupt, parallel) says what else becomes of it"
                raise Rejected("run_active", message, run=run)
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
        self._find_room()
        starts = Starts(run=self.session.last_run + 1, spec=self._spec())
        return self._decision(starts=starts, wakes=(starts.spec.queue,))

    def _queued(self, interrupts: Run | None = None) -> Decision:
        self._find_room()
        n = interrupts.n if interrupts else 0
        queued = Queued(run=self.session.last_run + 1, spec=self._spec(), interrupts=n)
        return self._decision(queued=queued, wakes=(interrupts.spec.queue,) if interrupts else ())

    def _steers(self, run: Run) -> Decision:
        """Only what is for this very run: another author's message, where that matters, or one for another agent or
        model, waits for its turn."""
        other = self.command.agent not in (None, run.spec.agent) or self.command.model
        if other or run.trigger == "action" or self._is_foreign(run):
            return self._queued()
        self._find_room()
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
        wakes = wakes_answered(self.session, run, len(said))
        return self._decision(answers=Answers(run=run.n, requests=said), wakes=wakes, settled=settled)

    # --- what they need ---------------------------------------------------------------------------------------------

    def _decision(
        self,
        *,
        wakes: tuple[str, ...] = (),
        settled: tuple[str, ...] = (),
        starts: Starts | None = None,
        queued: Queued | None = None,
        steers: Steers | None = None,
        answers: Answers | None = None,
    ) -> Decision:
        data = msgspec.structs.replace(self.posted, starts=starts, queued=queued, steers=steers, answers=answers)
        return Decision(event_of(self.command, self.session, data), wakes, settled=settled)

    def _spec(self) -> Spec:
        """What the run carries out, with everything pinned that was said about it."""
        if self.known is None:
            raise self._no_agent()
        policy = merged(self.known.policy, self.own_policy)
        model = self.command.model or self.known.model
        return msgspec.structs.replace(self.known, model=model, policy=policy)

    def _find_room(self) -> None:
        if self.session.waiting >= WAITING_MAX:
            run = self.session.key.run((self.session.holder or self.session.runs[0]).n)
            message = f"{WAITING_MAX} messages wait behind run {run} already; say it again when some are done"
            raise Rejected("run_active", message, run=run)

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

    def _no_agent(self) -> Rejected:
        return Rejected("agent_not_found", f"no agent {self.agent}", field="agent")
