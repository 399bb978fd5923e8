"""From bytes to fields, the same for every entrance: JSON bodies, idempotency keys, actors, sequences in headers.

What says what no text can say (a lone surrogate, bytes that are not UTF-8) is another fault than what is no JSON.
"""

import json
import re
from typing import cast

import msgspec

from turnstream import subjects
from turnstream_api.api import KEY_MAX, Api
from turnstream_api.checks import AUTHOR, CONTEXT_MAX
from turnstream_api.errors import Problem

_ETAG = re.compile(rb'"([0-9]{1,16})"')
_SEQUENCE = re.compile(r"-?[0-9]{1,16}")


def parse_json(body: bytes) -> dict[str, object]:
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise Problem("invalid", "the body is nested too deeply", field="body") from None
    except msgspec.ValidationError as error:
        raise Problem("invalid", f"the body: {error}", field="body") from None
    except msgspec.DecodeError as error:
        raise _unreadable(body, error) from None
    if not isinstance(fields, dict):
        raise Problem("invalid", "the body must be a JSON object", field="body")
    return cast("dict[str, object]", fields)


def _unreadable(body: bytes, error: msgspec.DecodeError) -> Problem:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return Problem("invalid", "the body is not UTF-8", field="body")
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return Problem("invalid_json", f"the body is not JSON: {error}")
    return Problem("invalid", "the body holds a lone surrogate, which is no character", field="body")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def body_max(api: Api) -> int:
    """Bytes of a JSON body: what the largest message may have when every character of it is escaped, and some more."""
    return 6 * (api.settings.message_max + api.settings.metadata_max + CONTEXT_MAX) + 65_536


def bytes_max(api: Api) -> int:
    """Bytes of a JSON body that holds an attachment: it is base64 there, and a third longer."""
    return api.settings.attachment_max * 4 // 3 + 16_384


def idempotency_key(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise Problem("invalid", "Idempotency-Key: not UTF-8", field="Idempotency-Key") from None
    if not 0 < len(text) <= KEY_MAX:
        raise Problem("invalid", f"Idempotency-Key: 1 to {KEY_MAX} characters", field="Idempotency-Key", limit=KEY_MAX)
    return text


def actor(named: str | None, default: str) -> str:
    """Who a program says that it asks for."""
    if named is None:
        return default
    if not AUTHOR.fullmatch(named):
        raise Problem(
            "invalid", f"{subjects.ACTOR}: must be user:<id>, agent:<name> or client:<id>", field=subjects.ACTOR
        )
    return named


def if_match(value: bytes) -> int:
    match = _ETAG.fullmatch(value.strip())
    if match is None:
        raise Problem("invalid", 'If-Match: a sequence in quotes, like "42"', field="If-Match")
    return int(match[1])


def last_event_id(value: bytes) -> int:
    text = value.strip().decode("latin-1")
    if not _SEQUENCE.fullmatch(text):
        raise Problem("invalid_cursor", "Last-Event-ID: not a sequence", field="Last-Event-ID")
    return int(text)
