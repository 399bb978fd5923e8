"""API keys: who may ask, and for which account.

A secret reads `ts_<account>_<key id>_<random>`; only its SHA-256 is stored, in the KV bucket `keys` under
`<account>.<key id>`. A revoked key stays there, marked, so that revoking the last key does not open the door again.
Where no key was ever made, everybody is let in as the default account (a machine of one's own).

Every API process holds all keys and follows the bucket, so a key is valid or revoked everywhere within moments, on open
streams too. Keys are added and revoked by who may write to the broker: `turnstream keys`.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable

import msgspec

from turnstream import ids, subjects
from turnstream.broker.answers import EXPECTED
from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerFault, StreamBehind
from turnstream.broker.pull import OrderedPull
from turnstream.telemetry import get_logger
from turnstream_api.errors import Problem

log = get_logger()

STREAM = f"KV_{subjects.KEYS}"
PREFIX = f"$KV.{subjects.KEYS}."
RETRY = 1.0
"""Seconds."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a key. Times are milliseconds since the epoch."""

    account: str
    id: str
    digest: str
    label: str = ""
    created_at: int
    revoked_at: int | None = None


class UnknownKey(Exception):
    """There is no such key."""


def make(account: str, *, label: str, now: int) -> tuple[str, Key]:
    """A new secret, which is shown once and never stored, and its key."""
    key_id = secrets.token_hex(6)
    secret = f"ts_{account}_{key_id}_{secrets.token_urlsafe(32)}"
    return secret, Key(account=account, id=key_id, digest=_digest(secret), label=label, created_at=now)


def _digest(secret: str) -> str:
    # The random part has 256 bits: nothing is gained by a slow hash.
    return hashlib.sha256(secret.encode()).hexdigest()


# --- for the command line -----------------------------------------------------------------------------------------


async def add_key(broker: Broker, account: str, *, label: str = "") -> tuple[str, Key]:
    """Makes a key and answers with its secret. Raises `ValueError` for what is no account, `BrokerFault`."""
    if not ids.is_name(account):
        raise ValueError(f"{account!r} is no account: lower-case letters, digits and -, at most 32")
    secret, key = make(account, label=label, now=broker.clock.now())
    await _put(broker, key, 0)
    return secret, key


async def list_keys(broker: Broker) -> list[Key]:
    """Every key, revoked ones too, by account and age. Raises `BrokerFault`."""
    found: list[Key] = []
    offset = 0
    while True:
        page = await broker.api(f"STREAM.INFO.{STREAM}", {"subjects_filter": f"{PREFIX}>", "offset": offset})
        state = msgspec.convert(page["state"], _State)
        entries = [await _get(broker, subject) for subject in state.subjects or ()]
        found += [entry[0] for entry in entries if entry is not None]
        offset += len(state.subjects or ())
        if not state.subjects or offset >= state.num_subjects:
            return sorted(found, key=lambda key: (key.account, key.created_at, key.id))


async def revoke_key(broker: Broker, account: str, key_id: str) -> Key:
    """Revokes a key for good; one that is revoked stays as it is. Raises `UnknownKey`, `BrokerFault`."""
    entry = await _get(broker, f"{PREFIX}{account}.{key_id}") if ids.is_name(account) and ids.is_token(key_id) else None
    if entry is None:
        raise UnknownKey(f"no key {key_id} of account {account}")
    key, seq = entry
    if key.revoked_at is None:
        key = msgspec.structs.replace(key, revoked_at=broker.clock.now())
        await _put(broker, key, seq)
    return key


async def _put(broker: Broker, key: Key, expected: int) -> None:
    headers = {EXPECTED: str(expected)}
    await broker.store(f"{PREFIX}{key.account}.{key.id}", msgspec.json.encode(key), headers)


async def _get(broker: Broker, subject: str) -> tuple[Key, int] | None:
    found = await broker.message(STREAM, {"last_by_subj": subject})
    return (msgspec.json.decode(found.data, type=Key), found.seq) if found and found.data else None


class _State(msgspec.Struct):
    num_subjects: int = 0
    subjects: dict[str, int] | None = None


# --- for the API --------------------------------------------------------------------------------------------------


class Keys:
    """Every key, as of now. `account`: whose the callers are while no key was ever made. `on_change` is called when
    keys that were valid may no longer be."""

    def __init__(self, account: str, *, on_change: Callable[[], None]) -> None:
        self._account = account
        self._on_change = on_change
        self._keys: dict[str, Key] = {}
        self._any = False
        self._loaded = asyncio.Event()

    @property
    def loaded(self) -> bool:
        return self._loaded.is_set()

    async def wait_loaded(self) -> None:
        await self._loaded.wait()

    def authenticate(self, authorization: bytes) -> tuple[str, str]:
        """Account and key id of a request's `Authorization`; no key id where none is needed. Raises `Problem`."""
        if not self.loaded:
            raise Problem("unavailable", "the API keys are not known yet")
        scheme, _, secret = authorization.partition(b" ")
        if not authorization and not self._any:
            return self._account, ""
        if scheme.lower() != b"bearer":
            raise Problem("unauthorized", "send `Authorization: Bearer <API key>`")
        key = self._find(secret.strip().decode("latin-1"))
        if key is None:
            raise Problem("unauthorized", "this API key is not known, or revoked")
        return key.account, key.id

    def valid(self, account: str, key_id: str) -> bool:
        """Whether who was let in as this may stay."""
        if not key_id:
            return not self._any
        key = self._keys.get(f"{account}.{key_id}")
        return key is not None and key.revoked_at is None

    def _find(self, secret: str) -> Key | None:
        parts = secret.split("_", 3)
        if len(parts) != 4 or parts[0] != "ts":
            return None
        key = self._keys.get(f"{parts[1]}.{parts[2]}")
        if key is None or key.revoked_at is not None or not hmac.compare_digest(key.digest, _digest(secret)):
            return None
        return key

    async def follow(self, broker: Broker) -> None:
        """Reads the bucket and follows it, for ever."""
        while True:
            pull = OrderedPull(broker, STREAM, [f"{PREFIX}>"], 0)
            try:
                if not (await broker.stream(STREAM)).state.messages:
                    self._loaded.set()
                async for deliveries in pull:
                    for delivery in deliveries:
                        self.take(delivery.subject.removeprefix(PREFIX), delivery.data)
                    if not deliveries[-1].pending:
                        self._loaded.set()
                    self._on_change()
            except StreamBehind as error:  # the bucket was lost: no key in it is one any more
                log.error("the API keys are gone", error=error)
                self._keys.clear()
            except BrokerFault as error:
                log.warning("the API keys are read anew", error=error)
            finally:
                await pull.close()
            await asyncio.sleep(RETRY)

    def take(self, name: str, value: bytes) -> None:
        """The newest value of a key; an empty one (somebody deleted the entry) is no key any more."""
        self._any = True
        try:
            self._keys[name] = msgspec.json.decode(value, type=Key)
        except msgspec.DecodeError:
            self._keys.pop(name, None)
