"""The nodes of a graph: what each type is told, and through which ports it may be left. What a node then does is the
business of `plan` and the runner; what an expression or a template comes to is in `evaluate.py`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self, TypeGuard, get_args

from pydantic import Field, StringConstraints, model_validator

from turnstream import schemas
from turnstream.agents.mcp import McpTool
from turnstream.agents.terms import (
    Control,
    Definition,
    Fixed,
    Json,
    Params,
    Place,
    Said,
    Schema,
    Seconds,
    ToolName,
    Unique,
    refusal,
)
from turnstream.agents.texts import Arguments, ExpressionText, TemplateText

if TYPE_CHECKING:
    from turnstream.agents.graph import WholeGraph

OUT: Final = "out"
ERR: Final = "err"
DEFAULT: Final = "default"
PORT: Final = r"[a-z][a-z0-9_]{0,31}"
"""A port, and the id of a node."""
ITERATIONS_MAX: Final = 1000
CHOICES_MAX: Final = 50

Port = Annotated[str, StringConstraints(pattern=f"^{PORT}$")]
AgentRef = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,32}(@[A-Za-z0-9_-]{1,32})?$")]
"""A saved agent: its name, or `name@version`."""


class _Node(Definition):
    PORTS: ClassVar[tuple[str, ...]] = (OUT,)
    """Through which any node of this type may be left."""

    description: str = ""

    @property
    def ports(self) -> tuple[str, ...]:
        """Through which it may be left."""
        return self.PORTS


class InputNode(_Node):
    """What the graph is given: the run's own input, an element, an iteration's value."""

    type: Literal["input"]


class LlmNode(_Node):
    """One agent loop: model calls, and the tools that they ask for. What is absent is the agent's own."""

    PORTS = (OUT, ERR)

    type: Literal["llm"]
    model: Said | None = None
    instructions: str | None = None
    prompt: TemplateText = "{{ input }}"
    params: Params | None = None
    tools: Annotated[Sequence[ToolName], Unique] | None = None
    mcp: Annotated[Sequence[str], Unique] | None = None
    """Names of the agent's servers."""
    control: Control | None = None
    output: Schema | None = None


class ToolNode(_Node):
    """One call of a registered tool."""

    PORTS = (OUT, ERR)

    type: Literal["tool"]
    tool: ToolName
    arguments: Arguments = {}


class McpNode(_Node):
    """One call of a tool of one of the agent's servers."""

    PORTS = (OUT, ERR)

    type: Literal["mcp"]
    server: Said
    tool: McpTool
    arguments: Arguments = {}


class Rule(Definition):
    """The port that is taken where an expression holds."""

    port: Port
    when: ExpressionText


class RouterNode(_Node):
    """The first rule that holds says the port; where none does, it is `default`."""

    type: Literal["router"]
    rules: Annotated[Sequence[Rule], Fixed]

    @property
    def ports(self) -> tuple[str, ...]:
        return (*(rule.port for rule in self.rules), DEFAULT)

    @model_validator(mode="after")
    def _has_rules(self) -> Self:
        faults: list[tuple[Place, str]] = []
        if not self.rules:
            faults.append((("rules",), "a router has rules"))
        seen: set[str] = set()
        for i, rule in enumerate(self.rules):
            if rule.port == DEFAULT:
                faults.append((("rules", i, "port"), "`default` is where no rule holds"))
            elif rule.port in seen:
                faults.append((("rules", i, "port"), f"{rule.port!r} is the port of another rule already"))
            seen.add(rule.port)
        if faults:
            raise refusal(faults)
        return self


class GuardrailNode(_Node):
    """Lets pass or blocks: by a rule, an expression that holds for what may pass, or by what a model makes of the text
    `check`."""

    PORTS = ("allow", "block")

    type: Literal["guardrail"]
    rule: ExpressionText | None = None
    check: TemplateText | None = None
    model: Said | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        faults: list[tuple[Place, str]] = []
        if (self.rule is None) == (self.check is None):
            faults.append(((), "either `rule` or `check`, and not both"))
        if self.model is not None and self.check is None:
            faults.append((("model",), "goes with `check`"))
        if faults:
            raise refusal(faults)
        return self


class HumanNode(_Node):
    """Asks a person, and waits. `timeout` is in seconds; nobody answering fails the run, or `default` is the answer."""

    type: Literal["human"]
    prompt: TemplateText
    answer: Schema | None = Field(default=None, alias="schema")
    choices: Annotated[Sequence[Said], Unique, Field(min_length=1, max_length=CHOICES_MAX)] | None = None
    timeout: Seconds | None = None
    on_timeout: Literal["fail", "default"] = "fail"
    default: Json = None

    @model_validator(mode="after")
    def _says_what_then(self) -> Self:
        faults: list[tuple[Place, str]] = []
        if self.on_timeout == "default":
            if self.timeout is None:
                faults.append((("timeout",), "is missing: without it nothing is waited out"))
            if self.default is None:
                faults.append((("default",), "is missing: it is the answer where nobody answers"))
            elif misfit := self._misfit(self.default):
                faults.append((("default",), f"is not an answer: {misfit}"))
        elif self.default is not None:
            faults.append((("default",), 'goes with `on_timeout = "default"`'))
        for i, choice in enumerate(self.choices or ()):
            if choice != choice.strip():
                faults.append((("choices", i), "begins or ends with a blank, and an answer does not"))
            elif misfit := self._misfit(choice):
                faults.append((("choices", i), f"is not an answer: {misfit}"))
        if faults:
            raise refusal(faults)
        return self

    def _misfit(self, answer: object) -> str | None:
        if self.choices is not None and answer not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        return None if self.answer is None else schemas.misfit_of(answer, self.answer)


class AgentNode(_Node):
    """A saved agent, as a run of its own."""

    PORTS = (OUT, ERR)

    type: Literal["agent"]
    agent: AgentRef
    prompt: TemplateText = "{{ input }}"
    output: Schema | None = None


class MapNode(_Node):
    """The graph inside it, once for each element of a list; what comes of them is a list in the same order. `over` is
    an expression that gives the list; absent, it is what arrives."""

    type: Literal["map"]
    graph: "WholeGraph"
    over: ExpressionText | None = None
    on_error: Literal["fail_fast", "collect"] = "fail_fast"


class LoopNode(_Node):
    """The graph inside it, again and again, each time with what came of it before, until an expression holds."""

    type: Literal["loop"]
    graph: "WholeGraph"
    until: ExpressionText
    max_iterations: Annotated[int, Field(ge=1, le=ITERATIONS_MAX)]


class OutputNode(_Node):
    """What the graph returns."""

    PORTS = ()

    type: Literal["output"]


Node = Annotated[
    InputNode
    | LlmNode
    | ToolNode
    | McpNode
    | RouterNode
    | GuardrailNode
    | HumanNode
    | AgentNode
    | MapNode
    | LoopNode
    | OutputNode,
    Field(discriminator="type"),
]
TYPES: Final[Mapping[str, type[_Node]]] = {
    get_args(node.model_fields["type"].annotation)[0]: node for node in get_args(get_args(Node)[0])
}
"""Every type of node by its name."""


def asks_model(node: Node) -> TypeGuard[LlmNode | GuardrailNode]:
    return isinstance(node, LlmNode) or (isinstance(node, GuardrailNode) and node.check is not None)
