"""Expressions of a graph, in CEL (https://github.com/google/cel-spec), over `input`, `nodes` and `session`.

The library is `cel`, in Rust. Measured on 2026-12-01 against `cel-python`: it compares numbers of different types and
values of different kinds as the language says, which JSON needs (`3 == 3.0`, `1 != "1"`), is compiled once, has no
crash that could be found, and takes a twentieth of the time.

It cannot be stopped, though, and counts bytes where the language counts characters. So what is carried out is not quite
what is written: in each macro (`map`, `filter`, `all`, `exists`, `exists_one`) every turn first asks whether there is
time left, and hands over what it makes to be weighed; `size` is ours.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from turnstream.agents.terms import not_json
from turnstream.agents.weight import weight_of

if TYPE_CHECKING:  # imported for the first expression: it brings a command line along, which takes longer than the rest
    import cel

EXPRESSION_MAX: Final = 1000
"""Characters."""
SECONDS_MAX: Final = 1.0
"""That the macros of an expression may take, of the processor: a machine that is busy fails nothing."""
WEIGHT_MAX: Final = 4 << 20
"""What the macros of an expression may make altogether, as `weight.py` weighs; truths and numbers are not weighed."""
NAMES: Final = ("input", "nodes", "session")
FUNCTIONS: Final = frozenset(
    {"bytes", "contains", "double", "duration", "dyn", "endsWith", "has", "int", "lowerAscii", "matches"}
    | {"size", "startsWith", "string", "timestamp", "trim", "type", "uint", "upperAscii"}
)
MACROS: Final = frozenset({"all", "exists", "existsOne", "exists_one", "filter", "map"})

_TYPES: Final = frozenset(
    {"bool", "bytes", "double", "duration", "int", "list", "map", "null_type", "string", "timestamp", "type", "uint"}
)
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<text>[bB]?[rR](?:\"{3}.*?\"{3}|'{3}.*?'{3}|"[^"\n]*"|'[^'\n]*')
      |[bB]?(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<number>0x[0-9a-fA-F]+[uU]?|(?:[0-9]+\.[0-9]+|[0-9]+|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[uU]?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>[=!<>]=|&&|[|]{2}|.)""",
    re.VERBOSE | re.DOTALL,
)
_OPEN: Final = "([{"
_CLOSE: Final = ")]}"


class ExpressionError(ValueError):
    """What is wrong with an expression, or with what it came to, for people."""


class Expression(msgspec.Struct, frozen=True):
    """One that can be carried out. `names`: which of `NAMES` it uses; `nodes`: the ids of the nodes that it names,
    `needs_all`: it uses `nodes` otherwise too."""

    program: "cel.Program"
    names: frozenset[str]
    nodes: frozenset[str]
    needs_all: bool

    def given(self, scope: Mapping[str, object]) -> dict[str, object]:
        """Of what there is, what it uses: every value is copied for the library, and outputs may be large."""
        given = {name: scope[name] for name in self.names}
        if "nodes" in given and not self.needs_all:
            nodes = cast("Mapping[str, object]", given["nodes"])
            given["nodes"] = {name: nodes[name] for name in self.nodes if name in nodes}
        return given


class _Token(NamedTuple):
    kind: str
    text: str


@lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """Raises `ExpressionError`."""
    if len(text) > EXPRESSION_MAX:
        raise ExpressionError(f"has {len(text)} characters, more than {EXPRESSION_MAX}")
    written = _compile(text)
    tokens = [_Token(found.lastgroup or "", found[0]) for found in _TOKEN.finditer(text) if found.lastgroup != "space"]
    bound = set(_bound(tokens))
    if taken := sorted(bound.intersection(NAMES)):
        raise ExpressionError(f"{taken[0]!r} is taken: it is what the graph gives")
    variables, functions = set(written.variables()), set(written.functions())
    if unknown := sorted(variables - bound - _TYPES - set(NAMES)):
        raise ExpressionError(f"unknown name {unknown[0]!r}; known: {', '.join(NAMES)}")
    if unknown := sorted(name for name in functions - FUNCTIONS if name.isidentifier()):
        raise ExpressionError(f"unknown function {unknown[0]!r}; known: {', '.join(sorted(FUNCTIONS | MACROS))}")
    nodes = list(_nodes(tokens))
    return Expression(
        program=_compile(" ".join(_guarded(tokens))),
        names=frozenset(variables.intersection(NAMES)),
        nodes=frozenset(nodes),
        needs_all=len(nodes) < sum(token.text == "nodes" for token in tokens),
    )


def holds(expression: Expression, scope: Mapping[str, object]) -> bool:
    """Whether it is true. Raises `ExpressionError`, also for what comes to neither true nor false."""
    result = value(expression, scope)
    if not isinstance(result, bool):
        raise ExpressionError(f"came to {type(result).__name__}, neither true nor false")
    return result


def value(expression: Expression, scope: Mapping[str, object]) -> object:
    """What it comes to, as JSON has it. Raises `ExpressionError`."""
    import cel
    from cel import stdlib

    meter = _Meter()
    context = cel.Context(
        variables=expression.given(scope),
        functions={
            "_go": meter.go,
            "_made": meter.made,
            "_size": meter.size,
            "lowerAscii": meter.text("lowerAscii", stdlib.lower_ascii),
            "trim": meter.text("trim", stdlib.trim),
            "upperAscii": meter.text("upperAscii", stdlib.upper_ascii),
        },
    )
    try:
        result = expression.program.execute(context)
    except KeyError as error:
        raise ExpressionError(meter.fault or f"there is no {error.args[0]!r}") from None
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ExpressionError(meter.fault or _first(str(error))) from None
    if meter.fault:
        raise ExpressionError(meter.fault)
    if fault := next(iter(not_json(cast(object, result))), None):
        raise ExpressionError(f"came to what JSON does not have: {fault[1]}")
    return cast(object, result)


class _Meter:
    """Stops what takes too long or makes too much. Its functions never raise: the library would print that. What they
    return instead is an error in the expression, and `fault` says which."""

    def __init__(self) -> None:
        self.fault = ""
        self._until = time.thread_time() + SECONDS_MAX
        self._left = WEIGHT_MAX

    def go(self) -> bool | None:
        """Whether there is a next turn; None is nothing that a condition can be."""
        if not self.fault and time.thread_time() > self._until:
            self.fault = f"takes longer than {SECONDS_MAX:g} s"
        return None if self.fault else True

    def made(self, value: object) -> object:
        if isinstance(value, (bool, int, float)):  # most often the truth of a condition, which is kept nowhere
            return value
        self._left -= weight_of(value, self._left)
        if self._left < 0:
            self.fault = self.fault or "makes more than an expression may"
            return None
        return value

    def size(self, *values: object) -> int | None:
        if len(values) == 1 and isinstance(values[0], (str, bytes, list, dict)):
            return len(cast("Sequence[object]", values[0]))
        return self._unfit("size", values)

    def text(self, name: str, function: Callable[[str], str]) -> Callable[..., str | None]:
        def of_text(*values: object) -> str | None:
            match values:
                case [str(value)]:
                    return function(value)
                case _:
                    return self._unfit(name, values)

        return of_text

    def _unfit(self, name: str, values: Sequence[object]) -> None:
        given = ", ".join(type(value).__name__ for value in values) or "nothing"
        self.fault = self.fault or f"{name}: there is none of {given}"


def _compile(text: str) -> "cel.Program":
    import cel

    try:
        return cel.compile(text)
    except ValueError as error:
        raise ExpressionError(_syntax(str(error))) from None


def _syntax(message: str) -> str:
    found = re.search(r"ERROR: <input>:(\d+):(\d+): ([^\n]*)", message)
    if not found:
        return f"is no expression: {message[:200]}"
    return f"is no expression: line {found[1]}, column {found[2]}: {found[3][:200]}"


def _first(message: str) -> str:
    """The library's messages go on with advice."""
    return re.split(r"\. (?=[A-Z])|\n", message.removesuffix("."), maxsplit=1)[0][:300]


def _bound(tokens: Sequence[_Token]) -> Iterator[str]:
    """The names that macros give."""
    for i, token in enumerate(tokens):
        if token.text == "(" and _macro(tokens, i) and i + 1 < len(tokens):
            yield tokens[i + 1].text


def _nodes(tokens: Sequence[_Token]) -> Iterator[str]:
    """Ids in `nodes.<id>` and `nodes["<id>"]`."""
    for i in range(len(tokens) - 2):
        if tokens[i].text == "nodes" and (i == 0 or tokens[i - 1].text != "."):
            if tokens[i + 1].text == "." and tokens[i + 2].kind == "name":
                yield tokens[i + 2].text
            elif tokens[i + 1].text == "[" and re.fullmatch(r"""(["'])[a-z0-9_]+\1""", tokens[i + 2].text):
                yield tokens[i + 2].text[1:-1]


def _macro(tokens: Sequence[_Token], i: int) -> bool:
    """Whether the bracket at `i` opens a macro."""
    return i > 1 and tokens[i - 2].text == "." and tokens[i - 1].text in MACROS


def _guarded(tokens: Sequence[_Token]) -> Iterator[str]:
    """The expression with every argument of a macro but the first, the name, made to ask and to be weighed."""
    around: list[bool | None] = []
    """For each open bracket: of a macro, whether its name is passed; else None."""
    for i, (kind, text) in enumerate(tokens):
        if kind == "sign" and text in _OPEN:
            around.append(False if _macro(tokens, i) else None)
            yield text
        elif kind == "sign" and text in _CLOSE:
            yield f") : null {text}" if around and around.pop() else text
        elif text == "," and around and around[-1] is not None:
            yield ") : null , _go() ? _made(" if around[-1] else ", _go() ? _made("
            around[-1] = True
        elif text == "size" and i + 1 < len(tokens) and tokens[i + 1].text == "(":
            yield "_size"
        else:
            yield text
