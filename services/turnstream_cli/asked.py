"""`requests`, `answer`, `approve`, `deny`: what runs wait for, and what a person says to it."""

from typing import Any, Literal

import msgspec

from turnstream.ids import parse_request_id, parse_run_id
from turnstream_cli import show
from turnstream_cli.client import HERE, Client, Connect, Refused, connected
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.look import lines, listed
from turnstream_cli.talk import Words, watch_run


async def requests(
    *,
    session: str | None = None,
    run: str | None = None,
    state: Literal["open", "answered", "approved", "denied", "expired", "closed", "any"] = "open",
    kind: Literal["question", "approval"] | None = None,
    limit: int = 50,
    json: bool = False,
    connect: Connect = HERE,
) -> None:
    """List what runs wait for: questions and approvals, the latest first.

    Parameters
    ----------
    session
        Only those of this session.
    run
        Only those of this run.
    state
        Only those in this state; `any` for all.
    kind
        Only questions, or only approvals.
    limit
        How many at most; 0 for all.
    json
        Print one line of JSON a request.
    """
    async with connected(connect) as client:
        rows = await listed(client, "/v1/requests", limit, session=session, run=run, kind=kind, state=state)
    if json:
        lines(rows)
        return
    columns = ("request", "kind", "state", "asked", "expires", "prompt")
    cells = [
        (
            row["id"],
            row["kind"],
            show.styled(row["state"]),
            show.local_time(row["asked_at"]),
            show.local_time(row.get("expires_at")),
            row["prompt"],
        )
        for row in rows
    ]
    show.table(show.console(), columns, cells, empty="no requests" if state != "open" else "nothing waits for a person")


async def answer(request: str, text: Words, *, wait: bool = True, json: bool = False, connect: Connect = HERE) -> int:
    """Answer a question, and watch the run go on.

    The answer is the text; where that does not fit and is JSON, it is what the JSON says.

    Parameters
    ----------
    request
        The request's id, `<run>.q<k>`; or the run's, if it asks one thing.
    text
        The answer.
    wait
        Wait for the end of the run.
    json
        Print one JSON object instead.
    """
    async with connected(connect) as client:
        try:
            given = await client.post(_path(request), {"answer": text})
        except Refused as refused:
            if refused.problem.get("field") == "approved":
                raise refused.with_hint(f"use `turnstream approve {request}` or `turnstream deny {request}`") from None
            value = _json(text)
            misfit = str(refused.problem.get("field", "")).startswith("answer")
            if isinstance(value, str) or not (misfit or refused.problem.get("code") == "already_answered"):
                raise
            given = await client.post(_path(request), {"answer": value})
        return await _go_on(client, given, wait=wait, json=json)


async def approve(request: str, *, wait: bool = True, json: bool = False, connect: Connect = HERE) -> int:
    """Let a call that needs an approval be carried out, and watch the run go on.

    Parameters
    ----------
    request
        The request's id, `<run>.q<k>`; or the run's, if it asks one thing.
    wait
        Wait for the end of the run.
    json
        Print one JSON object instead.
    """
    async with connected(connect) as client:
        given = await _decide(client, request, {"approved": True})
        return await _go_on(client, given, wait=wait, json=json)


async def deny(
    request: str, *, reason: str = "", wait: bool = True, json: bool = False, connect: Connect = HERE
) -> int:
    """Deny a call that needs an approval, and watch the run go on: the model is told.

    Parameters
    ----------
    request
        The request's id, `<run>.q<k>`; or the run's, if it asks one thing.
    reason
        Why; the model is told.
    wait
        Wait for the end of the run.
    json
        Print one JSON object instead.
    """
    async with connected(connect) as client:
        given = await _decide(client, request, {"approved": False} | ({"reason": reason} if reason else {}))
        return await _go_on(client, given, wait=wait, json=json)


async def _decide(client: Client, request: str, decision: dict[str, object]) -> dict[str, Any]:
    try:
        return await client.post(_path(request), decision)
    except Refused as refused:
        if refused.problem.get("field") == "approved":
            raise refused.with_hint(f"use `turnstream answer {request} …`") from None
        raise


async def _go_on(client: Client, given: dict[str, Any], *, wait: bool, json: bool) -> int:
    if not wait:
        show.print_json(given) if json else print(f"{given['request']} is answered (#{given['seq']})")
        return Exit.OK
    return await watch_run(client, given["run"], after=given["seq"] - 1, json=json, posted=given)


def _path(request: str) -> str:
    if parse_request_id(request):
        return f"/v1/requests/{request}/answer"
    if parse_run_id(request):
        return f"/v1/runs/{request}/input"
    raise CommandError(f"{request!r} is no request's id: it is `<run>.q<k>`, such as hello.1.q1", Exit.USAGE)


def _json(text: str) -> object:
    """What the text says if it is JSON, else the text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return text
