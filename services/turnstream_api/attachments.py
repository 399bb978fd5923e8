"""Attachments: put into a session, read back, and named by a message.

A message names what was put before; what it holds is a reference to one content, which stays as it is whatever is put
under the name later.
"""

from contextlib import suppress
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from turnstream.broker.errors import BrokerFault
from turnstream.ids import SessionKey
from turnstream.log.handle import Handled
from turnstream.session import attachments as rules
from turnstream.session.commands import PostMessage
from turnstream.session.errors import Rejected
from turnstream.session.events import Attachment
from turnstream.session.state import Session
from turnstream.wire.attachments import Interrupted, TooMany, blob_of
from turnstream.wire.blobs import BlobLost
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, File
from turnstream_api.errors import Problem
from turnstream_api.operation import Request

ANY: Final = "application/octet-stream"

_WORD: Final = "[A-Za-z0-9!#$&^_.+-]{1,127}"
MediaType = Annotated[
    str,
    Meta(
        max_length=255,
        pattern=rf"^{_WORD}/{_WORD}( *;[ -~]*)?{checks.WHOLE}",
        description="Over HTTP the header Content-Type.",
    ),
]
Digest = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{64}}{checks.WHOLE}", description="SHA-256 of the bytes, in hex.")]


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An attachment that was put into the session before: this content of it."""

    name: str
    sha256: Digest


Names = Annotated[
    list[str | Named],
    Meta(max_length=rules.MANY, description="What was put into the session before. A name alone: what it means now."),
]


class PutAttachment(Request, frozen=True, kw_only=True):
    """The bytes are the body, over NATS base64 in `content`."""

    session: str
    name: str
    content: bytes
    media_type: MediaType = ANY


class Put(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    media_type: str
    size: int
    sha256: str


async def put_attachment(api: Api, caller: Caller, request: PutAttachment) -> Answer:
    """Puts bytes into a session, for messages to name. The same again changes nothing (200); other bytes under the same
    name are what the name means from then on, and messages that named it keep what they have. What no message names
    expires."""
    key = checks.session_key(caller, request.session)
    name = _name(request.name, "name")
    limit = api.settings.attachment_max
    if (size := len(request.content)) > limit:
        raise Problem("too_large", f"{size} bytes, {limit} are allowed", field="content", limit=limit)
    _exists(key, await api.sessions.load(key))
    try:
        put, is_new = await api.attachments.put(key, name, _plain(request.media_type), request.content)
    except TooMany as error:
        raise Problem("already_exists", f"name: {error}; choose another one", field="name") from None
    except Interrupted:
        _exists(key, await api.sessions.load(key, await api.log.last(key)))
        raise
    session = await api.sessions.load(key, await api.log.last(key))
    if not session.exists:  # deleted meanwhile, and whoever removes what it has may have been here before
        await api.attachments.remove(key, put)
    _exists(key, session)
    body = Put(name=put.name, media_type=put.media_type, size=put.size, sha256=put.sha256)
    return Answer(body=body, status=201 if is_new else 200)


class GetAttachment(Request, frozen=True, kw_only=True):
    """`sha256`: this content; else what the name means now."""

    session: str
    name: str
    sha256: Digest | None = None


class Got(Put, frozen=True, kw_only=True):
    """Over NATS; over HTTP the bytes themselves are answered."""

    content: bytes


async def get_attachment(api: Api, caller: Caller, request: GetAttachment) -> Answer:
    """The bytes as they were put, with their type: to be saved, not shown."""
    key = checks.session_key(caller, request.session)
    name = rules.normal(request.name)
    _exists(key, await api.sessions.load(key))
    found = None if rules.fault_of(name) else await api.attachments.find(key, name, request.sha256)
    if found is None:
        raise Problem("not_found", f"no attachment {name[: rules.NAME_MAX]} in session {key.session}")
    pieces = api.blobs.read(blob_of(found))
    try:
        first = await anext(pieces, b"")
    except BlobLost:
        raise Problem("not_found", f"the bytes of attachment {name} are lost") from None
    return Answer(body=File(found, first, pieces))


async def handle(
    api: Api, key: SessionKey, command: PostMessage, named: list[str | Named], *, fresh: bool
) -> tuple[PostMessage, Handled]:
    """Says what the command says, with what it names. That is claimed before, so that no message names what is gone,
    and released where no message names it after all. Raises `Problem` naming the one that is not there."""
    if not named:
        return command, await api.handle(key, command, fresh=fresh)
    claimed = await _claimed(api, key, command, named)
    command = msgspec.structs.replace(command, attachments=claimed)
    try:
        handled = await api.handle(key, command, fresh=fresh)
    except Rejected:
        await _release(api, key, command, claimed)
        raise
    if handled.recorded is None:
        await _release(api, key, command, claimed)
    return command, handled


async def _claimed(api: Api, key: SessionKey, command: PostMessage, named: list[str | Named]) -> tuple[Attachment, ...]:
    """Nothing, where it is not what the message names that decides: of a repeat, or of a session that is not there."""
    session = await api.sessions.load(key)
    is_repeat = session.receipt(command.origin.idempotency_key) is not None
    if is_repeat or session.deleted or not (session.exists or command.opens):
        return ()
    found: dict[str, Attachment] = {}
    try:
        for position, one in enumerate(named):
            field = f"attachments[{position}]"
            given, sha256 = (one, None) if isinstance(one, str) else (one.name, one.sha256)
            name = _name(given, field)
            attachment = await api.attachments.claim(key, name, sha256, command.origin.id)
            if attachment is None:
                message = f"{field}: there is no attachment {name} in session {key.session}; put it there first"
                raise Problem("invalid", message, field=field)
            found[attachment.blob] = attachment
    except Exception:
        await _release(api, key, command, tuple(found.values()))
        raise
    return tuple(found.values())


async def _release(api: Api, key: SessionKey, command: PostMessage, claimed: tuple[Attachment, ...]) -> None:
    """Where that fails they stay, and go with their session."""
    with suppress(BrokerFault):
        await api.attachments.release(key, claimed, command.origin.id)


def _exists(key: SessionKey, session: Session) -> None:
    if not session.exists:
        raise checks.no_session(key.session)


def _name(given: str, field: str) -> str:
    name = rules.normal(given)
    if fault := rules.fault_of(name):
        raise Problem("invalid", f"{field}: {fault}", field=field)
    return name


def _plain(media_type: str) -> str:
    """Types are the same however they are capitalised; what their parameters say may not be."""
    essence, semicolon, parameters = media_type.partition(";")
    return f"{essence.strip().lower()}{semicolon}{parameters.rstrip()}"
