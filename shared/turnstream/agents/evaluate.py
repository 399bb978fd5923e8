"""What the templates and expressions of a node come to, for whoever carries it out. Pure: a node and what it sees go
in, a value comes out.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from turnstream.agents import expressions, templates
from turnstream.agents.expressions import ExpressionError
from turnstream.agents.nodes import (
    AgentNode,
    GuardrailNode,
    HumanNode,
    LlmNode,
    LoopNode,
    MapNode,
    McpNode,
    RouterNode,
    ToolNode,
)
from turnstream.agents.sandbox import kind_of
from turnstream.agents.templates import TemplateError
from turnstream.agents.terms import as_json


class Unfit(ValueError):
    """What a field of a node came to is nothing that can be used. The message is for people, and names the field."""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What a node sees. `input`: what arrived at it; `nodes`: the outputs of the finished nodes of its graph and of the
    graphs around it, by their ids; `session`: {account, id, run, author}."""

    input: object
    nodes: Mapping[str, object]
    session: Mapping[str, object]

    def names(self) -> dict[str, object]:
        return {"input": self.input, "nodes": self.nodes, "session": self.session}


def route(node: RouterNode, scope: Scope) -> str | None:
    """The port of the first rule that holds. Raises `Unfit`, like everything here."""
    for i, rule in enumerate(node.rules):
        if _holds(f"rules.{i}.when", rule.when, scope):
            return rule.port
    return None


def allows(node: GuardrailNode, scope: Scope) -> bool:
    """Whether a guardrail with a rule lets pass."""
    return _holds("rule", node.rule or "", scope)


def until(node: LoopNode, scope: Scope) -> bool:
    """Whether a loop is done; `input` is what its last iteration came to."""
    return _holds("until", node.until, scope)


def prompt(node: LlmNode | AgentNode | HumanNode | GuardrailNode, scope: Scope) -> str:
    """What a model, an agent or a person is told."""
    field, text = ("check", node.check or "") if isinstance(node, GuardrailNode) else ("prompt", node.prompt)
    try:
        return templates.render(templates.parse(text), scope.names())
    except TemplateError as error:
        raise Unfit(f"{field}: {error}") from None


def arguments(node: ToolNode | McpNode, scope: Scope) -> dict[str, object]:
    """What a tool is called with: every text in them is a template, and one that is exactly one `{{ … }}` is what that
    comes to."""
    return {name: _filled(f"arguments.{name}", value, scope.names()) for name, value in node.arguments.items()}


def elements(node: MapNode, scope: Scope) -> Sequence[object]:
    """What a map goes through, in this order: what `over` comes to, or what arrived, a text read as JSON."""
    field, found = "over", scope.input
    if node.over is not None:
        try:
            found = expressions.value(expressions.parse(node.over), scope.names())
        except ExpressionError as error:
            raise Unfit(f"{field}: {error}") from None
    else:
        field = "input"
        if isinstance(found, str):
            try:
                found = cast(object, msgspec.json.decode(found))
            except (msgspec.MsgspecError, RecursionError):
                raise Unfit(f"{field}: a map goes through a list, and this text is no JSON") from None
    if not isinstance(found, list):
        raise Unfit(f"{field}: a map goes through a list, and this is {kind_of(found)}")
    return cast("list[object]", found)


def written(value: object) -> tuple[str, bool]:
    """A value as text, and whether that is JSON: a text stays as it is, anything else is JSON."""
    return (value, False) if isinstance(value, str) else (as_json(value), True)


def _holds(field: str, text: str, scope: Scope) -> bool:
    try:
        return expressions.holds(expressions.parse(text), scope.names())
    except ExpressionError as error:
        raise Unfit(f"{field}: {error}") from None


def _filled(field: str, value: object, names: Mapping[str, object]) -> object:
    if isinstance(value, Mapping):
        inside = cast("Mapping[str, object]", value)
        return {name: _filled(f"{field}.{name}", inner, names) for name, inner in inside.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(f"{field}.{i}", inner, names) for i, inner in enumerate(cast("Sequence[object]", value))]
    if not isinstance(value, str):
        return value
    try:
        return templates.value(templates.parse(value), names)
    except TemplateError as error:
        raise Unfit(f"{field}: {error}") from None
