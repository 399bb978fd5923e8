"""What taking a message from the inbox means: `post_message` for a program that only publishes.

The body is plain text, or the JSON object that `post_message` takes. The idempotency key is the header of that name,
else `Nats-Msg-Id` (the broker itself, whatever the subjects, keeps only the first of two messages with one id within
a tenth of a second), else the body's `message_id`, else the message's place in the inbox. An unknown session is
opened, with the policy that the settings say (`inbox_on_busy`), for nobody is there to read a 409.

What comes for a deleted session is refused, and what it says is not kept anywhere.
"""

from typing import Final

import msgspec

from turnstream import ids, subjects
from turnstream.ids import DEFAULT_AGENT, SessionKey
from turnstream.log.base import Unavailable
from turnstream.session.events import PolicyData
from turnstream.session.policy import resolve
from turnstream.telemetry import TRACEPARENT, parse_traceparent
from turnstream.wire.inbox import Letter, Refused, TryAgain
from turnstream_api import checks, messages
from turnstream_api.api import Api, Caller
from turnstream_api.decoding import actor, idempotency_key, parse_json
from turnstream_api.errors import Problem, problem_of
from turnstream_api.operation import Operation, convert
from turnstream_api.operations import OPERATIONS

ACTOR = "client:inbox"

POST: Operation = next(operation for operation in OPERATIONS if operation.name == "post_message")


class Postbox:
    """Takes letters; see `turnstream.wire.inbox.Take`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def take(self, letter: Letter) -> None:
        try:
            await self._post(letter)
        except Exception as error:
            problem = problem_of(error)
            if problem.passes:
                raise TryAgain(problem.detail) from error
            if problem.code == "internal_error" and not isinstance(error, Problem):
                raise
            if await self._is_deleted(letter):
                gone = problem if problem.code == "not_found" else checks.no_session(letter.session)
                raise Refused("not_found", gone.detail, keep=False) from error
            raise Refused(problem.code, problem.detail) from error

    async def _is_deleted(self, letter: Letter) -> bool:
        if not ids.is_name(letter.account) or not ids.is_session(letter.session):
            return False
        try:
            session = await self._api.sessions.load(SessionKey(letter.account, letter.session))
        except Unavailable as error:
            raise TryAgain(str(error)) from error
        return session.deleted is not None

    async def _policy(self, account: str, agent: str | None) -> PolicyData | None:
        """Of a session that is opened by it: nobody is there to read a refusal."""
        spec = await self._api.spec(account, agent or DEFAULT_AGENT)
        refuses = spec is None or resolve(spec.policy).on_busy == "reject"
        return QUEUE if refuses and self._api.settings.inbox_on_busy == "queue" else None

    async def _post(self, letter: Letter) -> None:
        if not ids.is_name(letter.account):
            raise Problem("not_found", f"{letter.account!r} is no account")
        if not ids.is_session(letter.session):
            raise checks.no_session(letter.session)
        request = convert(POST, {**_fields(letter.data), "session": letter.session})
        assert isinstance(request, messages.PostMessage)
        given = letter.headers.get(subjects.IDEMPOTENCY_KEY, letter.headers.get(subjects.MESSAGE_ID))
        place = None if request.message_id else f"inbox {letter.seq} {letter.time}"
        caller = Caller(
            account=letter.account,
            actor=actor(letter.headers.get(subjects.ACTOR), ACTOR),
            idempotency_key=place if given is None else idempotency_key(given.encode()),
            traceparent=parse_traceparent(letter.headers.get(TRACEPARENT)),
        )
        policy = await self._policy(letter.account, request.agent)
        opens = checks.opens(agent=None, title=None, metadata=None, policy=policy)
        key = SessionKey(letter.account, letter.session)
        request = msgspec.structs.replace(request, wait=0.0)
        await messages.post(self._api, caller, key, request, opens if ids.may_open(letter.session) else None)


QUEUE: Final = PolicyData(on_busy="queue")


def _fields(data: bytes) -> dict[str, object]:
    """A JSON object as what it says, anything else as text."""
    if data.lstrip()[:1] == b"{":
        try:
            fields = parse_json(data)
        except Problem as problem:
            if problem.code != "invalid_json":
                raise
        else:
            if "session" in fields:
                raise Problem("invalid", "session: the subject says which", field="session")
            return fields
    try:
        return {"content": data.decode()}
    except UnicodeDecodeError:
        raise Problem("invalid", "the text is not UTF-8", field="content") from None
