"""What a template may do. Jinja's own sandbox keeps Python out of reach; this one also keeps a template from taking
long or making much, and lets it see nothing but JSON.

Closed by lists of what is allowed, never of what is not: statements and operators, filters, the few methods of texts
and objects. Loops are counted, whatever makes a text longer is measured before it is made, and every call looks at the
clock.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, cast

from jinja2 import StrictUndefined, Undefined, filters, nodes, pass_context, tests
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import SandboxedEnvironment

from turnstream.agents.terms import as_json
from turnstream.agents.weight import weight_of

SECONDS_MAX: Final = 1.0
"""That a template may take, of the processor: a machine that is busy fails nothing."""
TURNS_MAX: Final = 10_000
"""Of all its loops together, and what `range` may give."""
TEXT_MAX: Final = 1 << 20
"""Characters of a text that a template makes on its way."""
VALUE_MAX: Final = 4 << 20
"""What a value weighs at most that a template comes to."""
ITEMS_MAX: Final = 10_000
"""Of a list that a template makes."""
BITS_MAX: Final = 1024
"""Of a number that a template makes."""
KEYS_SHOWN: Final = 10
METER: Final = "_meter"
"""The variable that holds a rendering's meter; templates cannot name it."""
TURNS: Final = "_turns"
JOINED: Final = "_joined"

ALLOWED: Final = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Assign, nodes.Name, nodes.Const),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.Filter, nodes.Test, nodes.Call),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.Concat),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod),
)
_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, frozenset({"capitalize", "count", "endswith", "find", "lower", "lstrip", "rstrip", "split", "splitlines"})),
    (str, frozenset({"startswith", "strip", "title", "upper"})),
    (Mapping, frozenset({"get", "items", "keys", "values"})),
    (LoopContext, frozenset({"cycle", "first", "index", "index0", "last", "length", "nextitem", "previtem"})),
    (LoopContext, frozenset({"revindex", "revindex0"})),
)
_NO_TESTS: Final = frozenset({"callable", "escaped", "filter", "sameas", "test"})


class Spent(Exception):
    """What a template takes too much of."""


class Meter:
    """Of one rendering."""

    def __init__(self) -> None:
        self._until = time.thread_time() + SECONDS_MAX
        self._turns = TURNS_MAX

    def look(self) -> None:
        if time.thread_time() > self._until:
            raise Spent(f"takes longer than {SECONDS_MAX:g} s")

    def turn(self) -> None:
        self.look()
        self._turns -= 1
        if self._turns < 0:
            raise Spent(f"its loops go round more than {TURNS_MAX} times")


class Sandbox(SandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "%"})

    def __init__(self) -> None:
        super().__init__(
            autoescape=False,
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            optimized=False,
            finalize=pass_context(_text),
        )
        self.globals = {"range": _range}
        self.filters = cast("dict[str, Callable[..., object]]", dict(_filters()))
        self.tests = {name: test for name, test in tests.TESTS.items() if name not in _NO_TESTS}

    def getattr(self, obj: object, attribute: str) -> object:
        """An object's own keys go before its methods: data is looked at, not a library."""
        if isinstance(obj, Mapping) and attribute in obj:
            return cast("Mapping[str, object]", obj)[attribute]
        if isinstance(obj, Undefined) or any(isinstance(obj, kind) and attribute in names for kind, names in _METHODS):
            return cast(object, getattr(cast(object, obj), attribute))  # what is undefined says so
        return self.undefined(_absent(cast(object, obj), attribute), obj=obj, name=attribute)

    def getitem(self, obj: object, argument: object) -> object:
        if isinstance(obj, Undefined):
            return obj[argument]  # what is undefined says so
        if isinstance(obj, (Mapping, list, tuple, str)):
            try:
                return cast("Mapping[object, object]", obj)[argument]
            except (TypeError, LookupError):
                pass
        return self.undefined(_absent(cast(object, obj), argument), obj=obj, name=str(argument))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _meter(context).look()
        match operator, left, right:
            case "+", str(), str():
                _bound(len(left) + len(right), TEXT_MAX, "a text")
            case "+", list(), list():
                _bound(len(cast("list[object]", left)) + len(cast("list[object]", right)), ITEMS_MAX, "a list")
            case _, (int() | float()), (int() | float()):
                pass
            case _:
                raise TypeError(f"{kind_of(left)} {operator} {kind_of(right)} comes to nothing")
        result = cast(object, super().call_binop(context, operator, left, right))
        if isinstance(result, int):
            _bound(result.bit_length(), BITS_MAX, "a number")
        return result

    def call(self, context: Context, obj: object, *args: object, **kwargs: object) -> object:
        _meter(context).look()
        return cast(object, super().call(context, obj, *args, **kwargs))


def text_of(value: object) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(plain(value))


def plain(value: object) -> object:
    """A value of a template as JSON has it. Raises for what is none, and for what would be too much."""
    if isinstance(value, Iterator):
        value = list(cast("Iterator[object]", value))
    _bound(weight_of(value, VALUE_MAX), VALUE_MAX, "a value")
    return _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, Undefined):
        str(value)  # says what is undefined
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{value} is no number that JSON has")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in cast("Mapping[object, object]", value).items()}
    if isinstance(value, Iterable) and not isinstance(value, LoopContext):
        return [_plain(inner) for inner in cast("Iterable[object]", value)]
    raise TypeError(f"{kind_of(value)} is no value")


def _text(context: Context, value: object) -> str:
    _meter(context).look()
    return text_of(value)


def _as_json(context: Context, value: object) -> str:
    _meter(context).look()
    return as_json(plain(value))


def _list(context: Context, value: Iterable[object]) -> list[object]:
    _meter(context).look()
    return list(value)


def _turns(context: Context, value: Iterable[object]) -> Iterator[object]:
    """What a loop goes through."""
    meter = _meter(context)
    for one in value:
        meter.turn()
        yield one


def _joined(context: Context, parts: Iterable[object], between: object = "", attribute: str | None = None) -> str:
    """Also what `~` comes to."""
    texts: list[str] = []
    size = 0
    for part in parts:
        if attribute is not None:
            part = cast(Sandbox, context.environment).getattr(part, attribute)
        text = _text(context, part)
        size += len(text) + len(text_of(between))
        _bound(size, TEXT_MAX, "a text")
        texts.append(text)
    return text_of(between).join(texts)


def _replaced(context: Context, value: object, old: object, new: object) -> str:
    text, before, after = _text(context, value), text_of(old), text_of(new)
    _bound(len(text) + text.count(before) * max(0, len(after) - len(before)), TEXT_MAX * 8, "a text")
    return text.replace(before, after)


def _sum(context: Context, values: Iterable[object], attribute: str | None = None) -> object:
    sandbox, total = cast(Sandbox, context.environment), cast(object, 0)
    for value in values:
        one = value if attribute is None else sandbox.getattr(value, attribute)
        if not isinstance(one, (int, float)):
            raise TypeError(f"sum: {kind_of(one)} is no number")
        total = sandbox.call_binop(context, "+", total, one)
    return total


def _truncated(context: Context, value: object, length: int = 255, end: str = "…") -> str:
    text = _text(context, value)
    return text if len(text) <= length else text[: max(0, length - len(end))] + end


def _filters() -> Iterator[tuple[str, object]]:
    own = {
        TURNS: _turns,
        JOINED: _joined,
        "join": _joined,
        "json": _as_json,
        "list": _list,
        "replace": _replaced,
        "string": _text,
    }
    for name, function in {**own, "sum": _sum, "truncate": _truncated}.items():
        yield name, pass_context(function)
    texts: dict[str, Callable[[str], object]] = {"capitalize": str.capitalize, "lower": str.lower, "title": str.title}
    texts |= {"trim": str.strip, "upper": str.upper, "wordcount": lambda text: len(text.split())}
    for name, function in texts.items():
        yield name, _of_text(function)
    for name in ("abs", "count", "d", "default", "float", "int", "items", "length", "reverse", "round"):
        yield name, _looking(filters.FILTERS[name], "")
    for name in ("first", "last", "max", "min", "sort", "unique"):
        yield name, _looking(filters.FILTERS[name], "environment")
    for name in ("map", "reject", "rejectattr", "select", "selectattr"):
        yield name, _looking(filters.FILTERS[name], "context")


def _of_text(function: Callable[[str], object]) -> Callable[..., object]:
    def of_text(context: Context, value: object) -> object:
        return function(_text(context, value))

    return pass_context(of_text)


def _looking(function: Callable[..., object], given: str) -> Callable[..., object]:
    """One of Jinja's own, which gets first what it expects."""

    def look(context: Context, *args: object, **kwargs: object) -> object:
        _meter(context).look()
        first = {"": (), "environment": (context.environment,), "context": (context,)}[given]
        return function(*first, *args, **kwargs)

    return pass_context(look)


def _range(*bounds: int) -> list[int]:
    numbers = range(*bounds)
    _bound(len(numbers), ITEMS_MAX, "a list")
    return list(numbers)


def _meter(context: Context) -> Meter:
    return cast(Meter, context.resolve(METER))


def _bound(size: int, most: int, what: str) -> None:
    if size > most:
        raise Spent(f"makes {what} of more than {most}")


def _absent(obj: object, name: object) -> str:
    if not isinstance(obj, Mapping):
        return f"there is no {name!r} in {kind_of(obj)}"
    keys = list(cast("Mapping[object, object]", obj))
    known = ", ".join(str(key) for key in keys[:KEYS_SHOWN]) + (", …" if len(keys) > KEYS_SHOWN else "")
    return f"there is no {name!r}; there is {known or 'nothing'}"


def kind_of(value: object) -> str:
    """What a value is, for people."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "a text"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "a list"
        case _:
            return "an object" if isinstance(value, Mapping) else "something else"
