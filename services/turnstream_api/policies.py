"""Policies at the entrance: what a request may give, what the server says, what is in force.

What the fields mean and how layers are put together is in `turnstream.session.policy`.
"""

from collections.abc import Mapping
from typing import Annotated, Final, cast

import msgspec
from msgspec import Meta

from turnstream.session.events import NO_POLICY, PolicyData, Spec
from turnstream.session.policy import CHOICES, parse_policy, resolve
from turnstream.session.policy import Policy as Resolved
from turnstream.settings import Settings
from turnstream.specs import server_policy

ABOUT: Final[Mapping[str, str]] = {
    "on_busy": "a message while a run is live (one that waits for a person has `on_message`, whatever the message's own"
    " `on_busy` says): `reject` refuses it (409 `run_active`), `queue` lets it wait for a run of its own, `steer` lets"
    " the run take it before its next model call, `interrupt` cancels the run that holds the turn (where none does yet,"
    " the first in line) and comes next, before everything that is queued, `parallel` starts a run beside it",
    "message_on_busy": "whether a message may say `on_busy` itself",
    "on_message.question": "a message while a question is open: `answer` makes it the answer, `reject` refuses it (409"
    " `run_waiting`), `queue` and `parallel` are as above",
    "on_message.approval": "a message while an approval is open: `reject` refuses it (409 `run_waiting`), `decline`"
    " makes it the reason of a denial, `parallel` starts a run beside it",
    "on_message.parked": "a message while a run waits for its sub-agents alone (it is not live, and asks nobody):"
    " `interleave` starts a run at once, and the one that waits goes on behind it, `queue` lets the message wait for"
    " that, `reject` refuses it (409 `run_active`)",
    "authors": "`mixed`: a run takes the messages of everybody, and the model is shown who says what; `single`: only of"
    " the author whose message started it, and others wait for their turn",
    "starters": "whose messages may start a run: of `any`, of `people` (`user:…`), or of a list of authors; another's"
    " is stored and starts none",
    "recovery": "a run whose runner stopped: `resume` takes it over, `fail` ends it (`interrupted`), `durable` takes it"
    " over if its agent says that it is durable",
    "on_disconnect": "the client goes away that streams the run which its POST asked for: the run goes on (`detach`),"
    " or fails (`client_disconnected`)",
    "history.turns": "what the model sees of earlier turns: `all` of them, or of those `completed` the message and the"
    " answer alone",
    "history.tools": "what it sees of their tools: results `bounded` to 8 KiB each, in `full`, or `none`",
    "history.window": "`fit`: the newest turns that the model can take; `all`: everything, and a provider that cannot"
    " take it fails the run (`context_overflow`)",
    "history.compaction": "`on`: where little room is left, a summary, made behind a turn by the model of it, takes the"
    " place of what is old; `off`: nothing is summed up",
    "empty": "a model that says nothing at all: the run fails (`empty_reply`), or completes with a `note`",
    "clock": "the run's time-out while it waits for a person: it stands (`running`), or goes on (`wall`), as it does"
    " while the run waits for its sub-agents alone",
    "titles": "`derived` from the first message; `derived_then_agent`: that, until the agent's model has found a better"
    " one, behind the first turn; `client`: what a client gives; `none`: none. What a person gives stays under each",
    "delete.mode": "what goes with a deleted session: `erase`, everything; `detach`, all but its runs, which stay"
    " readable by themselves",
    "delete.active": "deleting a session in which a run has not ended: `reject` (409 `run_active`), or `cancel` the"
    " run",
}
"""Every field of a policy, for people."""


def _schema() -> dict[str, object]:
    """The JSON Schema of a policy, from the table of its fields."""
    fields: dict[str, dict[str, object]] = {name: {} for name in CHOICES if "." not in name}
    for name, values in CHOICES.items():
        group, _, field = name.rpartition(".")
        one: dict[str, object] = {"enum": list(values)}
        if name == "starters":
            one = {"anyOf": [one, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
        if name in ABOUT:
            one["description"] = ABOUT[name]
        if group:
            whole = fields.setdefault(group, {"type": "object", "properties": {}, "additionalProperties": False})
            cast("dict[str, object]", whole["properties"])[field] = one
        else:
            fields[name] = one
    return {"properties": fields, "additionalProperties": False}


Policy = Annotated[
    dict[str, object],
    Meta(
        description="What the session does where designs differ: a `preset`, and fields that change it. What is absent"
        " is as the agent says, else as the server does.",
        extra_json_schema=_schema(),
    ),
]
OnBusy = Annotated[
    str,
    Meta(
        description="What happens if a run is live; absent: the session's policy.",
        extra_json_schema={"enum": list(CHOICES["on_busy"])},
    ),
]


def given(policy: dict[str, object] | None) -> PolicyData | None:
    """What a request says. Raises `Rejected` naming the field."""
    return None if policy is None else parse_policy(policy)


def on_busy(given: str | None) -> PolicyData:
    """What a message says of itself. Raises `Rejected`."""
    return NO_POLICY if given is None else parse_policy({"on_busy": given}, where="")


def in_force(settings: Settings, spec: Spec | None, own: PolicyData) -> Resolved:
    """What holds in a session: what the server and the agent (`spec`; None: it is not there any more) say, and then the
    session itself."""
    return resolve(spec.policy if spec else server_policy(settings), own)


def shown(policy: Resolved) -> PolicyData:
    """Every field with its value, as JSON has it. It may be given as a policy again."""
    found: dict[str, object] = {}
    for name in CHOICES:
        if name == "preset":
            continue
        value = getattr(policy, name.replace(".", "_"))
        group, _, field = name.rpartition(".")
        if group:
            cast("dict[str, object]", found.setdefault(group, {}))[field] = value
        elif value is not None:
            found[name] = value
    return msgspec.convert(found, PolicyData)
