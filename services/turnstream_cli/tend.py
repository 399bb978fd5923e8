"""`config`, `keys`, `rebuild`, `fsck`: for whoever runs Turnstream. They work on broker and database themselves.

Where the settings name no NATS server they use that of the `turnstream dev` on the data directory; if none is running,
they start the embedded server on it for as long as they need it. A directory without a log is refused: it is more
likely the wrong one than an empty one that somebody asks about.
"""

import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cyclopts import App

from turnstream import settings as settings_file
from turnstream.settings import Settings
from turnstream_cli import progress, show
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.place import held, read_addresses
from turnstream_cli.serve import started
from turnstream_cli.stack import broker as embedded

if TYPE_CHECKING:
    from turnstream.broker.connection import Broker

CONNECT = 10.0
"""Seconds to wait for the NATS server."""

keys = App(name="keys", help="API keys: who may ask, and for which account. While there is none, everybody may.")


def config(*, json: bool = False) -> None:
    """Show every effective setting and where it came from; secrets are masked.

    Parameters
    ----------
    json
        Print one line of JSON a setting.
    """
    from turnstream.specs import server_policy

    settings = settings_file.load()
    server_policy(settings)  # refuses a policy that no service would start with
    rows = settings_file.explain(settings, {}, os.environ)
    if json:
        for row in rows:
            show.print_json(row._asdict())
        return
    out = show.console()
    cells = [(row.name, _written(row.value), row.origin, row.description) for row in rows]
    show.table(out, ("setting", "value", "from", "what"), cells, empty="")
    for name in settings_file.unknown(os.environ):
        out.print(f"{name} names no setting and is not used", style="yellow", markup=False)


def _written(value: object) -> object:
    """The value as the environment would say it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return None if value == {} else value


async def rebuild(*, json: bool = False) -> None:
    """Make the views anew from the log, beside the ones in force, while everything goes on; then put them in force.

    Parameters
    ----------
    json
        Print the new checkpoint as JSON.
    """
    from turnstream.views.database import Database
    from turnstream_projector import rebuild as rebuilding

    async with place(started()) as settings, connection(settings) as broker:
        database = Database(settings.database)
        try:
            with progress.shown("rebuild") as say:
                done = await rebuilding.rebuild(broker, database, on_progress=lambda at: say(at.position, at.last))
        except rebuilding.Overtaken as error:
            raise CommandError(str(error), Exit.REFUSED) from None
        finally:
            await database.close()
    if json:
        show.print_json(done)
    else:
        print(f"views of generation {done.generation} are in force, as of sequence {done.position}")


async def fsck(*, json: bool = False) -> Exit:
    """Check the log (chains, one holder of the turn, paired calls, terminal states) and the views against it.

    The exit code is 1 if anything is wrong; each fault is named.

    Parameters
    ----------
    json
        Print one line of JSON a fault.
    """
    async with place(started()) as settings:
        return await check(settings, json=json)


async def check(settings: Settings, *, json: bool = False) -> Exit:
    """`fsck` on the broker and database of these settings."""
    from turnstream.views.database import Database
    from turnstream_projector import fsck as checking

    async with connection(settings) as broker:
        database = Database(settings.database)
        try:
            with progress.shown("fsck") as say:
                report = await checking.fsck(broker, database, on_progress=lambda at: say(at.position, at.last))
        finally:
            await database.close()
    if json:
        for finding in report.findings:
            show.print_json(finding)
    else:
        cells = [(finding.kind, finding.where, finding.seq, finding.message) for finding in report.findings]
        if cells:
            show.table(show.console(), ("fault", "where", "seq", "what"), cells, empty="")
        views = "there are no views" if report.position is None else f"views compared as of {report.position}"
        print(f"{report.events} events read, {views}, {len(cells)} faults")
    return Exit.FAILED if report.findings else Exit.OK


@keys.command(name="add")
async def keys_add(account: str, *, label: str = "", json: bool = False) -> None:
    """Make a key for an account. Its secret is shown now and never again.

    Parameters
    ----------
    account
        Whose key it is; every id lives inside an account.
    label
        What it is for, to tell it from others.
    json
        Print one JSON object.
    """
    from turnstream_api.keys import add_key

    async with place(started()) as settings, connection(settings) as broker:
        try:
            secret, key = await add_key(broker, account, label=label)
        except ValueError as error:
            raise CommandError(str(error), Exit.USAGE) from None
    if json:
        show.print_json({"account": key.account, "id": key.id, "label": key.label, "secret": secret})
    else:
        print(secret)


@keys.command(name="list")
async def keys_list(*, json: bool = False) -> None:
    """List every key, revoked ones too; no secrets.

    Parameters
    ----------
    json
        Print one line of JSON a key.
    """
    from turnstream_api.keys import list_keys

    async with place(started()) as settings, connection(settings) as broker:
        found = await list_keys(broker)
    rows = [
        {
            "account": key.account,
            "id": key.id,
            "label": key.label,
            "created_at": key.created_at,
            "revoked_at": key.revoked_at,
        }
        for key in found
    ]
    if json:
        for row in rows:
            show.print_json(row)
        return
    cells = [
        (
            row["account"],
            row["id"],
            row["label"],
            show.local_time(row["created_at"]),
            show.local_time(row["revoked_at"]),
        )
        for row in rows
    ]
    columns = ("account", "key", "label", "made", "revoked")
    show.table(show.console(), columns, cells, empty="no keys: everybody may ask")


@keys.command(name="revoke")
async def keys_revoke(key: str, second: str | None = None, /) -> None:
    """Revoke a key, for good and at once; its open streams end. The API does not open again by that.

    Parameters
    ----------
    key
        The key's id, as `keys list` shows it; or its account, and then the id.
    second
        The key's id, if its account stands before it.
    """
    from turnstream_api.keys import UnknownKey, list_keys, revoke_key

    async with place(started()) as settings, connection(settings) as broker:
        if second is None:
            accounts = [known.account for known in await list_keys(broker) if known.id == key]
            if len(accounts) > 1:
                whose = ", ".join(accounts)
                raise CommandError(
                    f"{whose} have a key {key} each: `turnstream keys revoke <account> {key}`", Exit.USAGE
                )
            if not accounts:
                raise CommandError(f"there is no key {key}; `turnstream keys list` shows them", Exit.REFUSED)
            account = accounts[0]
        else:
            account, key = key, second
        try:
            await revoke_key(broker, account, key)
        except UnknownKey as error:
            raise CommandError(str(error), Exit.REFUSED) from None
    print(f"revoked {key} of {account}")


@asynccontextmanager
async def place(settings: Settings) -> AsyncGenerator[Settings, None]:
    """The settings with a NATS server in them (see the module). Raises `CommandError`."""
    if settings.nats_url:
        yield settings
    elif addresses := read_addresses(settings.data_dir):
        yield settings.model_copy(update={"nats_url": addresses.nats})
    elif not (settings.data_dir / "nats").is_dir():
        raise CommandError(
            f"there is no Turnstream's data in {settings.data_dir.absolute()}: call this where it is, or name it with "
            "TURNSTREAM_DATA_DIR, or its server with TURNSTREAM_NATS_URL",
            Exit.USAGE,
        )
    else:
        with held(settings.data_dir):
            async with embedded(settings.model_copy(update={"nats_port": 0})) as effective:
                yield effective


@asynccontextmanager
async def connection(settings: Settings) -> "AsyncGenerator[Broker, None]":
    """A connection to the broker, its streams and buckets made. Raises `BrokerFault`."""
    from turnstream.broker.service import connect

    broker = await connect(settings, name="turnstream", monotonic=time.monotonic, timeout=CONNECT)
    try:
        yield broker
    finally:
        await broker.close()
