"""What a call came to, as the fact that says so: the result that the model of the run sees, or, where a node of a graph
is the call, the node's end.
"""

import msgspec

from turnstream.session.events import NodeFinished, ToolReturned, ToolStatus
from turnstream.session.graph import ERR
from turnstream.session.paths import place
from turnstream.session.plan import CallTool, Detach, Park, Return, Settle, StartChild
from turnstream.session.state import Call

Result = ToolReturned | NodeFinished


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """`output` is text, or with `json` a JSON value; of every status but `ok` there is an `error`. `duration` is in
    milliseconds."""

    status: ToolStatus = "ok"
    output: str = ""
    json: bool = False
    error: str = ""
    duration: int = 0


def result(effect: CallTool | Settle | Return | StartChild | Detach | Park, call: Call, came: Came) -> Result:
    if call.is_node:
        failed = came.status != "ok"
        return NodeFinished(
            run=effect.run,
            attempt=effect.attempt,
            **place(call.path),
            port=ERR if failed else "out",
            output="" if failed else came.output,
            json=came.json and not failed,
            error=_why(came) if failed else "",
            duration=came.duration,
        )
    return ToolReturned(
        run=effect.run,
        attempt=effect.attempt,
        call_id=call.id,
        **place(call.path),
        status=came.status,
        output=came.output,
        error=came.error,
        duration=came.duration,
    )


def _why(came: Came) -> str:
    return came.error if came.status == "error" else f"{came.status}: {came.error}"
