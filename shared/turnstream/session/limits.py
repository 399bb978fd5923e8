"""What a run may use: whether it has used it up, so that no further model call is made."""

from turnstream.session.events import Error
from turnstream.session.state import Run

UNIT = 1_000_000
MISFITS_MAX = 3
"""Answers that do not fit what was asked for, and the run fails."""


def spent(run: Run) -> Error | None:
    """Why the run has to end before it calls the model again."""
    limits = run.limits
    if run.tool_calls > limits.max_tool_calls:
        return Error(code="budget_exceeded", message=f"more than {limits.max_tool_calls} tool calls")
    if limits.max_tokens is not None and run.usage.total > limits.max_tokens:
        return Error(code="budget_exceeded", message=f"more than {limits.max_tokens} tokens")
    if limits.max_cost is not None and run.usage.cost > limits.max_cost:
        return Error(code="budget_exceeded", message=f"it cost more than {limits.max_cost / UNIT:g}")
    if any(count >= limits.max_same_calls for _, count in run.same_calls):
        return Error(
            code="tool_loop_detected", message=f"the same call with the same arguments {limits.max_same_calls} times"
        )
    if any(count >= limits.max_same_denials for _, count in run.same_denials):
        return Error(code="repeated_denial", message=f"the same call was denied {limits.max_same_denials} times")
    if run.misfits >= MISFITS_MAX:
        code = "model_error" if run.spec.output else "child_failed"
        return Error(code=code, message=f"{MISFITS_MAX} answers did not fit the schema")
    if run.steps == 0:
        return None
    if run.steps >= limits.max_steps:
        return Error(code="max_steps_exceeded", message=f"no answer after {limits.max_steps} steps")
    if run.steps >= limits.max_model_calls:
        return Error(code="budget_exceeded", message=f"no answer after {limits.max_model_calls} model calls")
    return None
