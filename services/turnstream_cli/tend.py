"""`config`, `keys`, `rebuild`, `fsck`: for whoever runs Turnstream. They work on broker and database themselves.

Where the settings name no NATS server they use that of the `turnstream dev` on the data directory; if none is running,
they start the embedded server for as long as they need it.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from cyclopts import App

from turnstream import settings as settings_file
from turnstream.settings import Settings
from turnstream_cli import show
from turnstream_cli.place import held, read_addresses
from turnstream_cli.stack import broker

keys = App(name="keys", help="API keys: who may ask, and for which account. While there is none, everybody may.")


def config(*, json: bool = False) -> None:
    """Show every effective setting and where it came from; secrets are masked.

    Parameters
    ----------
    json
        Print one line of JSON a setting.
    """
    rows = settings_file.explain(settings_file.load(), {}, os.environ)
    if json:
        for row in rows:
            show.print_json(row._asdict())
        return
    console = show.console()
    cells = [(row.name, row.value, row.origin, row.description) for row in rows]
    show.table(console, ("setting", "value", "from", "what"), cells, empty="")
    for name in settings_file.unknown(os.environ):
        console.print(f"{name} names no setting and is not used", style="yellow", markup=False)


@asynccontextmanager
async def place(settings: Settings) -> AsyncGenerator[Settings]:
    """The settings with a NATS server in them (see the module)."""
    if not settings.nats_url and (addresses := read_addresses(settings.data_dir)):
        yield settings.model_copy(update={"nats_url": addresses.nats})
    elif settings.nats_url:
        yield settings
    else:
        with held(settings.data_dir):
            async with broker(settings.model_copy(update={"nats_port": 0})) as effective:
                yield effective
