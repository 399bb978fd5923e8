"""Templates of a graph, in Jinja, over `input`, `nodes` and `session`. What one may do: `sandbox.py`.

A template comes to a text. One that is exactly one `{{ … }}` may come to the value itself instead: so arguments of
tools are templates all the way down, and a number stays a number.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, cast

import msgspec
from jinja2 import Template, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.runtime import Context

from turnstream.agents.sandbox import ALLOWED, JOINED, METER, TURNS, Meter, Sandbox, Spent, plain
from turnstream.agents.terms import not_json

TEMPLATE_MAX: Final = 16 << 10
"""Characters of a template."""
OUTPUT_MAX: Final = 256 << 10
"""Bytes of what it comes to."""
BINDINGS_MAX: Final = 8
"""Loops and `set`s of a template, and"""
SHARED_MAX: Final = 64
"""names in its lists and objects: with more of them, few objects could be an endless value."""
NAMES: Final = ("input", "nodes", "session")
_RESULT: Final = "result"
_SANDBOX: Final = Sandbox()


class TemplateError(ValueError):
    """What is wrong with a template, or with what it came to, for people."""


class Rendering(msgspec.Struct, frozen=True):
    """A template that can be carried out. `value`: the one that comes to a value, of a template that may. `nodes`: the
    ids of the nodes that it names."""

    text: Template
    value: Template | None
    nodes: frozenset[str]


@lru_cache(maxsize=1024)
def parse(source: str) -> Rendering:
    """Raises `TemplateError`."""
    if len(source) > TEMPLATE_MAX:
        raise TemplateError(f"has {len(source)} characters, more than {TEMPLATE_MAX}")
    try:
        tree = _SANDBOX.parse(source)
        _check(tree)
        named = frozenset(_named(tree))
        single = _single(tree)
        text = _compile(tree)
        value = _compile(nodes.Template([_assigned(single)])) if single is not None else None
    except TemplateSyntaxError as error:
        raise TemplateError(f"is no template: line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, MemoryError):
        raise TemplateError("is no template: too much inside one another") from None
    return Rendering(text, value, named)


def render(template: Rendering, scope: Mapping[str, object]) -> str:
    """The text that it comes to. Raises `TemplateError`."""
    parts: list[str] = []
    size = 0
    try:
        for part in template.text.root_render_func(_context(template.text, scope)):
            size += len(part.encode(errors="replace"))
            if size > OUTPUT_MAX:
                raise Spent(f"comes to more than {OUTPUT_MAX} bytes")
            parts.append(part)
    except Exception as error:  # whatever a template does, it is the template's fault
        raise TemplateError(_said(error)) from None
    return "".join(parts)


def value(template: Rendering, scope: Mapping[str, object]) -> object:
    """What it comes to: the value of one that is exactly one `{{ … }}`, else the text. Raises `TemplateError`."""
    if template.value is None:
        return render(template, scope)
    context = _context(template.value, scope)
    try:
        for _ in template.value.root_render_func(context):
            pass
        return plain(context.vars[_RESULT])
    except Exception as error:
        raise TemplateError(_said(error)) from None


def _context(template: Template, scope: Mapping[str, object]) -> Context:
    return template.new_context({name: scope[name] for name in NAMES} | {METER: Meter()})


def _compile(tree: nodes.Template) -> Template:
    tree.set_environment(_SANDBOX)
    code = _SANDBOX.compile(tree)
    return Template.from_code(_SANDBOX, code, _SANDBOX.globals)


def _check(tree: nodes.Template) -> None:
    """Refuses what a template may not do, and has its loops and joined texts measured."""
    bindings = shared = 0
    for node in tree.find_all(nodes.Node):
        if not isinstance(node, ALLOWED):
            raise TemplateSyntaxError(f"`{type(node).__name__.lower()}` is not for templates", node.lineno)
        for name in (getattr(node, "name", None), getattr(node, "attr", None)):
            if isinstance(name, str) and name.startswith("_"):
                raise TemplateSyntaxError(f"{name!r}: names that begin with `_` are out of reach", node.lineno)
        match node:
            case nodes.For(recursive=True) | nodes.Call(dyn_args=nodes.Node()) | nodes.Call(dyn_kwargs=nodes.Node()):
                raise TemplateSyntaxError("that is not for templates", node.lineno)
            case nodes.Filter(dyn_args=nodes.Node()) | nodes.Filter(dyn_kwargs=nodes.Node()) | nodes.Filter(node=None):
                raise TemplateSyntaxError("that is not for templates", node.lineno)
            case nodes.Const() if fault := next(iter(not_json(cast(object, node.value))), None):
                raise TemplateSyntaxError(fault[1], node.lineno)
            case nodes.For() | nodes.Assign():
                bindings += 1
            case nodes.List() | nodes.Tuple() | nodes.Dict():
                shared += sum(1 for _ in node.find_all(nodes.Name))
            case _:
                pass
    if bindings > BINDINGS_MAX:
        raise TemplateSyntaxError(f"{bindings} loops and `set`s, more than {BINDINGS_MAX}", 1)
    if shared > SHARED_MAX:
        raise TemplateSyntaxError(f"{shared} names in lists and objects, more than {SHARED_MAX}", 1)
    unknown = sorted(meta.find_undeclared_variables(tree) - {*NAMES, "range"})
    if unknown:
        raise TemplateSyntaxError(f"unknown name {unknown[0]!r}; known: {', '.join(NAMES)}", 1)
    _measure(tree)


def _measure(node: nodes.Node) -> None:
    for field, inside in node.iter_fields():
        if isinstance(inside, list):
            setattr(node, field, [_measured(one) for one in cast("list[object]", inside)])
        else:
            setattr(node, field, _measured(inside))
    for child in node.iter_child_nodes():
        _measure(child)


def _measured(one: object) -> object:
    match one:
        case nodes.For():
            one.iter = _filter(TURNS, cast(nodes.Expr, one.iter))
        case nodes.Concat():
            return _filter(JOINED, nodes.List(one.nodes, lineno=one.lineno))
        case _:
            pass
    return one


def _filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _named(tree: nodes.Template) -> Iterator[str]:
    """Ids in `nodes.<id>` and `nodes["<id>"]`."""
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if isinstance(node.node, nodes.Name) and node.node.name == "nodes":
            if isinstance(node, nodes.Getattr):
                yield node.attr
            elif isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
                yield node.arg.value


def _single(tree: nodes.Template) -> nodes.Expr | None:
    match tree.body:
        case [nodes.Output(nodes=[nodes.Expr() as one])] if not isinstance(one, nodes.TemplateData):
            return one
        case _:
            return None


def _assigned(value: nodes.Expr) -> nodes.Assign:
    return nodes.Assign(nodes.Name(_RESULT, "store", lineno=1), value, lineno=1)


def _said(error: Exception) -> str:
    match error:
        case RecursionError() | MemoryError():
            return "too much inside one another"
        case Spent() | UndefinedError() | TypeError() | ValueError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"
