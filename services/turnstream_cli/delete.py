"""`delete`: deletes a session of a running Turnstream, through its API."""

from typing import Any, Literal

from turnstream_cli import show
from turnstream_cli.client import HERE, Connect, connected
from turnstream_cli.exits import Exit
from turnstream_cli.talk import checked


async def delete(
    session: str,
    *,
    mode: Literal["detach", "erase"] | None = None,
    active: Literal["cancel", "reject"] | None = None,
    wait: float = 0.0,
    json: bool = False,
    connect: Connect = HERE,
) -> Exit:
    """Delete a session, and everything that was said in it.

    The exit code is 1 if it is not erased within `--wait` seconds; it will be once a runner has come to it.

    Parameters
    ----------
    session
        Which one.
    mode
        `detach` keeps its runs with what came of them, `erase` keeps nothing; default: what its policy says.
    active
        What becomes of runs that have not ended: `cancel` them, or `reject` to delete; default: what its policy says.
    wait
        Seconds to wait until everything is removed.
    json
        Print the receipt as JSON.
    """
    path = f"/v1/sessions/{checked(session)}"
    async with connected(connect, timeout=30.0 + wait) as client:
        await client.delete(path, mode=mode, active=active, wait=wait or None)
        receipt: dict[str, Any] = await client.get(f"{path}/receipt")
    erased = receipt["erased_at"] is not None
    if json:
        show.print_json(receipt)
    elif erased:
        print(f"session {session} is deleted ({receipt['mode']}): {receipt['events_removed']} events removed")
    else:
        print(f"session {session} is deleted ({receipt['mode']}); a runner removes what it leaves behind")
    return Exit.FAILED if wait and not erased else Exit.OK
