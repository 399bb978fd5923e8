"""What a session does where designs differ. Every field is observable; a value that is not offered is refused, by name.

A policy is layers of what was given: by the server, the agent, the session, the message. A layer that names a preset
begins anew with it; each field that a layer gives replaces what was said before. `resolve` makes one policy of them;
what concerns a run is pinned in its spec when it is requested.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, Literal, cast

import msgspec

from turnstream.session.errors import Rejected
from turnstream.session.events import NO_POLICY, DeleteMode, PolicyData

Preset = Literal["strict", "memory", "thread", "workspace"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Every field with its value; as it stands, the preset `strict`. `a_b` is `a.b` in JSON.

    `on_busy`: what a message does that comes while a run is live. `message_on_busy`: whether a message may say that
    itself. `on_message.…`: what a message does while a run has open questions, open approvals, or is parked: waits for
    its sub-agents alone.
    `authors`: whether a run takes messages of anybody, or only of the author whose message started it. `starters`: who
    may start a turn. `recovery`: what becomes of a run whose runner stopped (`durable`: resume if its agent is
    durable). `on_disconnect`: what becomes of a run when the client that streams it goes away. `history.…`: what of
    the session the model sees. `empty`: how a run ends whose model says nothing at all. `clock`: whether a run's time
    goes on while it waits for a person. `titles`: where titles come from. `delete.…`: what becomes of the runs of a
    deleted session, and whether one with a live run can be deleted.
    """

    on_busy: Literal["reject", "queue", "steer", "interrupt", "parallel"] = "reject"
    message_on_busy: Literal["allow", "refuse"] = "allow"
    on_message_question: Literal["answer", "reject", "queue", "parallel"] = "answer"
    on_message_approval: Literal["reject", "decline", "parallel"] = "reject"
    on_message_parked: Literal["interleave", "queue", "reject"] = "reject"
    authors: Literal["mixed", "single"] = "mixed"
    starters: Literal["any", "people"] | tuple[str, ...] = "any"
    recovery: Literal["resume", "fail", "durable"] = "resume"
    on_disconnect: Literal["detach", "fail"] = "detach"
    history_turns: Literal["all", "completed"] = "all"
    history_tools: Literal["bounded", "full", "none"] = "bounded"
    history_window: Literal["fit", "all"] = "fit"
    history_compaction: Literal["off", "on"] = "off"
    empty: Literal["fail", "note"] = "fail"
    clock: Literal["running", "wall"] = "running"
    titles: Literal["derived_then_agent", "derived", "client", "none"] = "derived_then_agent"
    delete_mode: DeleteMode = "erase"
    delete_active: Literal["cancel", "reject"] = "reject"

    def may_start(self, author: str) -> bool:
        """Whether a message of this author may start a turn. A person is an author `user:…`."""
        if isinstance(self.starters, tuple):
            return author in self.starters
        return self.starters == "any" or author.startswith("user:")


STRICT: Final = Policy()
PRESETS: Final[Mapping[Preset, Policy]] = {
    "strict": STRICT,
    "memory": Policy(
        on_busy="parallel",
        on_message_question="parallel",
        on_message_approval="parallel",
        on_message_parked="interleave",
        recovery="durable",
        on_disconnect="fail",
        history_turns="completed",
        history_tools="none",
        history_window="all",
        empty="note",
        titles="none",
        delete_mode="detach",
        delete_active="cancel",
    ),
    "thread": Policy(
        on_busy="steer",
        on_message_approval="decline",
        on_message_parked="interleave",
        authors="single",
        recovery="fail",
        history_tools="full",
        history_window="all",
        empty="note",
        titles="client",
        delete_mode="detach",
        delete_active="cancel",
    ),
    "workspace": Policy(
        on_busy="queue",
        on_message_parked="interleave",
        history_window="all",
        empty="note",
        delete_mode="detach",
        delete_active="cancel",
    ),
}

GROUPS: Final = ("on_message", "history", "delete")
STARTERS_MAX: Final = 100
AUTHOR_MAX: Final = 128


@lru_cache(maxsize=1024)
def resolve(*layers: PolicyData) -> Policy:
    """The policy of these layers, each over the one before it."""
    policy = STRICT
    for layer in layers:
        if layer is not NO_POLICY:
            given = dict(_flat(cast("dict[str, object]", msgspec.to_builtins(layer))))
            preset = cast("Preset | None", given.pop("preset", None))
            if preset:
                policy = PRESETS[preset]
            policy = msgspec.structs.replace(policy, **given)
    return policy


@lru_cache(maxsize=1024)
def merged(*layers: PolicyData) -> PolicyData:
    """One layer that says what these say together."""
    found: dict[str, object] = {}
    for layer in layers:
        given = cast("dict[str, object]", msgspec.to_builtins(layer))
        if "preset" in given:
            found = {}
        for name, value in given.items():
            before = found.get(name)
            found[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return msgspec.convert(found, PolicyData) if found else NO_POLICY


def parse_policy(given: Mapping[str, object], where: str = "policy") -> PolicyData:
    """The policy fields of a request or a file. Raises `Rejected` naming the field that is unknown, has an unknown
    value; null is "not given"."""
    said: dict[str, object] = {}
    for name, value in given.items():
        path = f"{where}.{name}" if where else name
        if name not in GROUPS:
            if (one := _checked(name if "." not in name else "", path, value)) is not None:
                said[name] = one
        elif isinstance(value, Mapping):
            group = cast("Mapping[str, object]", value)
            inner = {field: _checked(f"{name}.{field}", f"{path}.{field}", one) for field, one in group.items()}
            if found := {field: one for field, one in inner.items() if one is not None}:
                said[name] = found
        elif value is not None:
            raise Rejected("invalid", f"{path}: must be an object", field=path)
    return msgspec.convert(said, PolicyData) if said else NO_POLICY


def _checked(name: str, path: str, value: object) -> object:
    """The value, as JSON has it, if this field of the policy may have it; `path` is what it is called where it was
    given."""
    if name not in CHOICES:
        raise Rejected("invalid", f"{path}: no such policy field", field=path)
    if value is None:
        return None
    if name == "starters" and isinstance(value, (list, tuple)):
        names = cast("list[object]", value)
        if not 0 < len(names) <= STARTERS_MAX or not all(
            isinstance(one, str) and 0 < len(one) <= AUTHOR_MAX for one in names
        ):
            message = f"{path}: must be any, people, or a list of 1 to {STARTERS_MAX} authors"
            raise Rejected("invalid", message, field=path)
        return list(names)
    if not isinstance(value, str) or value not in CHOICES[name]:
        raise Rejected("invalid", f"{path}: must be one of {', '.join(CHOICES[name])}", field=path)
    return value


def _flat(given: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in given.items():
        if name in GROUPS:
            yield from ((f"{name}_{field}", inner) for field, inner in cast("dict[str, object]", value).items())
        else:
            yield name, tuple(cast("list[str]", value)) if isinstance(value, list) else value


def _choices() -> dict[str, tuple[str, ...]]:
    """Every field that may be given, as JSON has it, and its values."""
    found: dict[str, tuple[str, ...]] = {"preset": tuple(PRESETS)}
    for field in msgspec.structs.fields(Policy):
        group = next((group for group in GROUPS if field.name.startswith(f"{group}_")), None)
        name = f"{group}.{field.name.removeprefix(f'{group}_')}" if group else field.name
        literal = field.type
        found[name] = tuple(_literals(literal))
    return found


def _literals(hint: object) -> Iterator[str]:
    for part in cast("tuple[object, ...]", getattr(hint, "__args__", ())):
        if isinstance(part, str):
            yield part
        elif getattr(part, "__origin__", None) is Literal:
            yield from _literals(part)


CHOICES: Final[Mapping[str, tuple[str, ...]]] = _choices()
