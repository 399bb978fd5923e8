"""`turnstream …`: reads the command line, runs the command, turns its end into an exit code."""

import asyncio
import inspect
import sys
from importlib.metadata import version
from typing import Any

from cyclopts import App, CycloptsError
from rich.console import Console

from turnstream_cli.exits import CommandError, Exit

HELP = """Event-sourced sessions and runs for AI agents.

Exit codes: 0 done · 1 it did not come out well (a run failed, `fsck` found a fault) · 2 wrong argument or setting ·
3 Turnstream does not answer · 4 Turnstream refused · 5 the run waits for a person · 130 interrupted.
"""
TALK = "Talk (any running Turnstream, --url)"
LOOK = "Look (any running Turnstream, --url)"


COMMANDS = {
    "Start": ("serve:dev", "demo:demo", "serve:api", "serve:runner", "serve:projector"),
    TALK: (
        "within:open_",
        "talk:send",
        "talk:act",
        "talk:tail",
        "talk:stop",
        "talk:retry",
        "within:withdraw",
        "fork:fork",
        "delete:delete",
        "asked:requests",
        "asked:answer",
        "asked:approve",
        "asked:deny",
    ),
    LOOK: ("look:sessions", "within:history", "within:queue", "look:runs", "look:steps", "look:ops"),
    "Agents": ("agents:agents",),
    "Tend": ("tend:rebuild", "tend:fsck", "tend:config", "tend:keys"),
}
"""By group: module and function, or app, of each command. What is not asked for is not imported."""


def build() -> App:
    app = App(name="turnstream", help=HELP, version=version("turnstream"))
    for group, commands in COMMANDS.items():
        for command in commands:
            app.command(f"turnstream_cli.{command}", group=group)
    return app


def main(tokens: list[str] | None = None) -> int:
    errors = Console(stderr=True, highlight=False)
    try:
        command, bound, _ = build().parse_args(tokens, exit_on_error=False, print_error=True, error_console=errors)
        result: Any = command(*bound.args, **bound.kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return result if isinstance(result, int) else Exit.OK
    except CycloptsError:
        return Exit.USAGE
    except CommandError as error:
        return _fail(errors, str(error), error.code)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return Exit.OK
    except Exception as error:
        for module, name, what, code in _FAILURES:
            if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
                return _fail(errors, what + str(error), code)
        raise


_FAILURES = (
    ("turnstream.settings", "SettingsError", "", Exit.USAGE),
    ("turnstream.broker.errors", "BrokerFault", "the NATS server: ", Exit.UNREACHABLE),
    ("turnstream.log.base", "LogError", "the log: ", Exit.UNREACHABLE),
    ("turnstream.views.database", "ViewsError", "the views' database: ", Exit.UNREACHABLE),
    ("turnstream.agents.errors", "AgentsError", "", Exit.USAGE),
)
"""Module, class, beginning of the message, exit code. By name: what a command does not need it does not import."""


def run() -> None:
    sys.exit(main())


def _fail(console: Console, message: str, code: Exit) -> int:
    console.print(f"turnstream: {message}", style="red", markup=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    run()
