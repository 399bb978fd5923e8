"""`send`, `act`, `tail`, `stop`, `retry`: say or do something in a session, watch what happens in one, stop it, try
again."""

import contextlib
import json as json_
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from cyclopts import Parameter
from rich.console import Console

from turnstream.ids import is_session, may_open, parse_run_id
from turnstream.session.state import TERMINAL
from turnstream_cli.attach import put
from turnstream_cli.client import HERE, Client, Connect, connected
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.follow import CaughtUp, Delta, Disconnected, Event, follow
from turnstream_cli.screen import Screen, for_people
from turnstream_cli.show import print_json

OnBusy = Literal["reject", "queue", "steer", "interrupt", "parallel"]
Words = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""What a person says; it may begin with a hyphen, or be one."""
Files = Annotated[Sequence[Path], Parameter(negative=())]
WAITING = "run.waiting"
DELETED = "session.deleted"


async def send(
    session: str,
    text: Words = "",
    *,
    author: str | None = None,
    agent: str | None = None,
    model: str | None = None,
    on_busy: OnBusy | None = None,
    attach: Files = (),
    context: str | None = None,
    wait: bool = True,
    json: bool = False,
    connect: Connect = HERE,
) -> int:
    """Say something to a session and watch the run that it goes to, until that has ended or waits for a person.

    An unknown session is opened. The exit code is 0 if the run completed, 5 if it waits.

    Parameters
    ----------
    session
        The session's id.
    text
        What to say; `-` reads it from standard input.
    author
        Who says it, such as `user:ann`; default: the caller.
    agent
        Who answers; default: the session's agent.
    model
        The model for this turn; default: the agent's.
    on_busy
        What happens if a run is live; default: the session's policy. While a run waits for a person it does not count:
        the policy's `on_message` decides.
    attach
        A file that goes with it; may be given several times. What is said may then be empty: ''.
    context
        What your window shows; the model sees it in this turn only.
    wait
        Wait for the end of the run.
    json
        Print one JSON object instead.
    """
    said = sys.stdin.read() if text == "-" else text
    async with connected(connect) as client:
        attachments = await put(client, checked(session), attach) or None
        fields = {"author": author, "agent": agent, "model": model, "on_busy": on_busy}
        posted = await post_text(client, session, said, fields | {"context": context, "attachments": attachments})
        if not wait or "run" not in posted:
            print_json(posted) if json else print(f"{await _went(client, posted)} (#{posted['seq']})")
            return Exit.OK
        if not json and posted["routed"] != "started":
            notice(f"{await _went(client, posted)} (#{posted['seq']})")
        return await watch_run(client, posted["run"], after=posted["seq"], json=json, posted=posted)


async def act(
    session: str,
    verb: str,
    arguments: str = "{}",
    *,
    author: str | None = None,
    wait: bool = True,
    json: bool = False,
    connect: Connect = HERE,
) -> int:
    """Call a tool of a session's agent yourself, and watch what comes of it. Later turns are shown what you did.

    Parameters
    ----------
    session
        The session's id.
    verb
        The tool.
    arguments
        What it is called with: a JSON object.
    author
        Who does it, such as `user:ann`; default: the caller.
    wait
        Wait until it is done.
    json
        Print one JSON object instead.
    """
    body: dict[str, Any] = {"arguments": _object(arguments)} | ({"author": author} if author else {})
    async with connected(connect) as client:
        acted = await client.post(f"/v1/sessions/{checked(session)}/actions/{quote(verb, safe='')}", body)
        if not wait or (acted["routed"] == "queued" and not json):
            print_json(acted) if json else print(f"{await _went(client, acted)} (#{acted['seq']})")
        if not wait:
            return Exit.OK
        return await watch_run(client, acted["run"], after=acted["seq"], json=json, posted=acted)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json_.loads(text)
    except ValueError as error:
        raise CommandError(f"the arguments are not JSON: {error}", Exit.USAGE) from None
    if not isinstance(value, dict):
        raise CommandError("the arguments are not a JSON object", Exit.USAGE)
    return value


async def _went(client: Client, posted: dict[str, Any]) -> str:
    """Where a message or an action went."""
    run = posted.get("run", "")
    match posted["routed"]:
        case "queued":
            queue = await client.get(f"/v1/sessions/{posted['session']}/queue")
            before = [item["run"] for item in queue["items"] if item["seq"] < posted["seq"] and item["run"] != run]
            front = before[-1] if before else queue["active"]
            return f"queued as {run}" + (f", behind {front}" if front not in (None, run) else "")
        case "steered":
            return f"steers {run}"
        case "answered":
            return f"answers what {run} asks"
        case "none":
            return "starts nothing: by the session's policy (`starters`) its author may not start a turn"
        case routed:
            return f"{routed} {run}"


async def retry(session: str, *, wait: bool = True, json: bool = False, connect: Connect = HERE) -> int:
    """Try the latest turn of a session again, which failed, and watch the new run.

    Parameters
    ----------
    session
        The session's id.
    wait
        Wait for the end of the run.
    json
        Print one JSON object instead.
    """
    async with connected(connect) as client:
        retried = await client.post(f"/v1/sessions/{checked(session)}/retry")
        if not wait:
            print_json(retried) if json else print(f"{retried['run']} tries {retried['retry_of']} again")
            return Exit.OK
        return await watch_run(client, retried["run"], after=retried["seq"] - 1, json=json, posted=retried)


async def stop(session: str, *, reason: str = "", json: bool = False, connect: Connect = HERE) -> None:
    """Cancel every run of a session that has not ended.

    Parameters
    ----------
    session
        The session's id.
    reason
        Why; it is stored with each cancel.
    json
        Print the answer as JSON.
    """
    async with connected(connect) as client:
        answer = await client.post(f"/v1/sessions/{checked(session)}/stop", {"reason": reason} if reason else {})
    print_json(answer) if json else print(f"stopped: {', '.join(answer['stopped']) or 'nothing was live'}")


async def tail(
    target: str,
    *,
    after: int | None = None,
    new: bool = False,
    deltas: bool = True,
    json: bool = False,
    connect: Connect = HERE,
) -> int:
    """Watch a session, from its first event on, until it is deleted; or one run of it until it has ended.

    A connection that ends is opened again at the last event seen, however often. With a run the exit code is 0 if it
    completed.

    Parameters
    ----------
    target
        A session's id, or a run's (`<session>.<n>`).
    after
        Begin after this sequence.
    new
        Begin with what happens from now on.
    deltas
        Show text while it is made.
    json
        Print each stored event as one line of JSON, byte for byte as it was sent.
    """
    run = parse_run_id(target)
    session = checked(run[0] if run else target)
    async with connected(connect) as client:
        if new:
            after = (await client.get(f"/v1/sessions/{session}"))["seq"]
        if run:
            return await watch_run(client, target, after=after or 0, json=json, every=json)
        screen = Screen(Console(highlight=False), say=notice)
        async with contextlib.aclosing(follow(client, session, after=after or 0, deltas=deltas and not json)) as items:
            async for item in items:
                match item:
                    case Event() if json:
                        print_json(item.raw)
                        if item.type == DELETED:
                            return Exit.OK
                    case Disconnected() if json:
                        notice(f"{item.reason}; connecting again")
                    case _:
                        if not json:
                            screen.show(item)
                        if isinstance(item, Event) and item.type == DELETED:
                            return Exit.OK
    raise AssertionError("a feed has no end")


async def watch_run(
    client: Client, run_id: str, *, after: int, json: bool, every: bool = False, posted: dict[str, Any] | None = None
) -> int:
    """Shows one run until its terminal event is there; nothing else ends it. `every`: each event as a line of JSON.
    `posted`: the answer of the write that asked for it; then also a question to a person ends the watching."""
    run = parse_run_id(run_id)
    assert run is not None
    session, number = run
    screen = Screen(Console(highlight=False), say=notice)
    if posted and "message" in posted:
        screen.know(posted["message"], posted["seq"])
    async with contextlib.aclosing(follow(client, session, after=after, deltas=not json)) as items:
        async for item in items:
            match item:
                case Event() if _about(item, number):
                    if every:
                        print_json(item.raw)
                    elif not json:
                        screen.show(item)
                    if item.type in TERMINAL:
                        outcome = _outcome(item)
                        if json and not every:
                            print_json({**(posted or {}), "run": run_id, "outcome": outcome})
                        return Exit.OK if outcome["status"] == "completed" else Exit.FAILED
                    if item.type == WAITING and posted and (asked := for_people(item.data["requests"])):
                        return _tell_waiting(run_id, asked, posted, screen, json=json)
                case Delta() if str(item.record["run"]) in (run_id, str(number)):
                    screen.show(item)
                case Disconnected() if json:
                    notice(f"{item.reason}; connecting again")
                case Disconnected():
                    screen.show(item)
                case CaughtUp() if posted and "routed" in posted and posted["routed"] != "answered":
                    pass
                case CaughtUp() if posted:  # what was said may have left something open
                    stands = await client.get(f"/v1/runs/{run_id}/wait", timeout=0)
                    if asked := stands.get("requests"):
                        for request in () if json else asked:
                            screen.request(request)
                        return _tell_waiting(run_id, asked, posted, screen, json=json)
                case CaughtUp():
                    ended = await _ended_before(client, run_id, after)
                    if ended is not None:
                        return ended
                case _:
                    pass
    raise AssertionError("a feed has no end")


def _tell_waiting(
    run_id: str, requests: list[dict[str, Any]], posted: dict[str, Any], screen: Screen, *, json: bool
) -> Exit:
    """Says what the run waits for and how that is answered; the exit code."""
    if json:
        print_json({**posted, "run": run_id, "status": "waiting", "requests": requests})
    for request in () if json else requests:
        screen.hint(how_to_answer(request))
    return Exit.WAITING


def how_to_answer(request: dict[str, Any]) -> str:
    """The command that answers it."""
    name = request["request"]
    if request["kind"] == "approval":
        return f"turnstream approve {name}, or: turnstream deny {name} --reason '…'"
    return f"turnstream answer {name} {shlex.quote((request.get('choices') or ['…'])[0])}"


async def _ended_before(client: Client, run_id: str, after: int) -> Exit | None:
    """The exit code if the run's end lies before where we began. Raises `Refused` if there is no such run."""
    run = await client.get(f"/v1/runs/{run_id}")
    if not run["ended_at"] or run["seq"] > after:
        return None
    notice(f"run {run_id} had {run['status']} before")
    return Exit.OK if run["status"] == "completed" else Exit.FAILED


def checked(session: str) -> str:
    """The id, if it can be one: it becomes part of an address. Raises `CommandError`."""
    if not is_session(session):
        raise CommandError(f"{session!r} is no session's id: letters, digits, _ and -, at most 64", Exit.USAGE)
    return session


def notice(text: str) -> None:
    print(f"… {text}", file=sys.stderr, flush=True)


def _about(event: Event, number: int) -> bool:
    """Whether the event is the run's: one of it, a message that went to it, or the end of its session."""
    data = event.data
    routed = next((data[how] for how in ("starts", "queued", "steers", "answers") if data.get(how)), {})
    return event.type == DELETED or number in (data.get("run"), routed.get("run"))


def _outcome(event: Event) -> dict[str, Any]:
    """How the run ended, in the words of the API."""
    names = ("status", "reasoning", "blob", "note", "error", "reason", "finish", "usage", "model")
    said = {name: event.data[name] for name in names if name in event.data}
    if event.type == DELETED:
        said["reason"] = "session_deleted"
    return {"status": "cancelled", **said, "output": event.data.get("content", ""), "seq": event.seq}


async def post_text(client: Client, session: str, text: str, fields: Mapping[str, object]) -> dict[str, Any]:
    """Posts to the session, which is opened if it is not there (a child's, which nobody opens, must be)."""
    given = {name: value for name, value in fields.items() if value is not None}
    if may_open(session):
        return await client.post("/v1/runs", {"session": session, "input": text, **given})
    return await client.post(f"/v1/sessions/{session}/messages", {"content": text, **given})
