"""`fork`: a new session that begins with what another one has, through the API of a running Turnstream."""

from typing import Annotated

from cyclopts import Parameter

from turnstream_cli import show
from turnstream_cli.client import HERE, Connect, connected
from turnstream_cli.exits import Exit
from turnstream_cli.talk import checked


async def fork(
    session: str,
    *,
    at: int | None = None,
    id: Annotated[str | None, Parameter(name="--as")] = None,
    title: str | None = None,
    wait: float = 30.0,
    json: bool = False,
    connect: Connect = HERE,
) -> Exit:
    """Fork a session: a new one that begins with what this one has, and goes its own way.

    What is going on in it does not go on in the fork. The exit code is 1 if the fork is not whole within `--wait`
    seconds; it will be once a runner has copied the rest.

    Parameters
    ----------
    session
        Which one.
    at
        The sequence up to which the fork has its events, as `tail` and `history` show it; default: all of them.
    id
        The new session's id; default: one that is made up.
    title
        Its title; default: as the session's at that place.
    wait
        Seconds to wait until it is whole.
    json
        Print the answer as JSON.
    """
    given = {"at": at, "id": checked(id) if id else None, "title": title}
    body = {name: value for name, value in given.items() if value is not None}
    async with connected(connect, timeout=30.0 + wait) as client:
        answer = await client.post(f"/v1/sessions/{checked(session)}/fork", body, wait=wait)
    if json:
        show.print_json(answer)
    else:
        what = "" if answer["whole"] else "; it is not whole yet: a runner copies the rest"
        print(f"session {answer['session']} is a fork of {session} up to #{answer['from']['seq']}{what}")
    return Exit.OK if answer["whole"] else Exit.FAILED
