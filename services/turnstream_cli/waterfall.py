"""A run's waterfall in a terminal: what was done, one a line, each a bar on the time axis of the whole run. A run of a
graph is a tree: nodes, and under a map or a loop its elements, or iterations, with theirs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstream_cli.show import STYLES, duration, printable, styled

Step = Mapping[str, Any]

_MARKS = {"model": "◆", "tool": "⚙", "wait": "?", "child": "⑂", "node": "◈"}
_PART = re.compile(r"\[[0-9]+\]|[^.\[\]]+")
"""Of a path: a node, an element."""
BAR = 60
"""Columns of the time axis at most, 12 at least."""


class _Axis:
    """The time of the whole run, in so many columns."""

    def __init__(self, steps: Sequence[Step], width: int) -> None:
        self.begin = min(step["began_at"] for step in steps)
        self.end = max(step.get("ended_at") or step["began_at"] for step in steps)
        self.width = width
        self._scale = width / max(1, self.end - self.begin)

    @property
    def title(self) -> str:
        return f"0 … {duration(self.end - self.begin)}"

    def bar(self, began: int, ended: int | None, status: str) -> Text:
        start = min(int((began - self.begin) * self._scale), self.width - 1)
        length = max(1, min(round(((ended or self.end) - began) * self._scale), self.width - start))
        return Text(" " * start + "━" * length, style=STYLES.get(status, "cyan"))


def show(out: Console, steps: Sequence[Step]) -> None:
    """The steps, as the API gives them."""
    if not steps:
        out.print("no steps yet", style="dim")
    elif any(step.get("path") for step in steps):
        _show_tree(out, steps)
    else:
        _show_list(out, sorted(steps, key=lambda step: step["began_at"]))


def _show_list(out: Console, steps: Sequence[Step]) -> None:
    axis = _Axis(steps, max(20, min(BAR, out.width - 60)))
    grid = _grid("try", "step", "what", "status", "took", width=24)
    grid.add_column(axis.title, no_wrap=True)
    for step in steps:
        ended = step.get("ended_at")
        bar = axis.bar(step["began_at"], ended, step["status"])
        took = _took(step["began_at"], ended)
        grid.add_row(str(step["attempt"]), str(step["step"]), _named(step), styled(step["status"]), took, bar)
    out.print(grid)


def _named(step: Step) -> str:
    name = f"{step['name']} {step['child_run']}" if "child_run" in step else step["name"]
    return f"{_MARKS.get(step['kind'], '·')} {printable(name)}"


def _took(began: int, ended: int | None) -> str:
    return "…" if ended is None else duration(ended - began)


def _grid(*names: str, width: int) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in names:
        grid.add_column(name, no_wrap=True, max_width=width, justify="right" if name == "tokens" else "left")
    return grid


# --- graphs -------------------------------------------------------------------------------------------------------


class _Branch:
    """A node, an element of a map, an iteration of a loop, or (the root) the run. `own`: the node's step, if it has
    one; `done`: what was done for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own: Step | None = None
        self.done: list[Step] = []
        self.inside: dict[str, _Branch] = {}

    def put(self, step: Step) -> None:
        branch = self
        for part in _PART.findall(step.get("path", "")):
            branch = branch.inside.setdefault(part, _Branch(part))
        if step["kind"] == "node":
            branch.own = step
        else:
            branch.done.append(step)

    @property
    def steps(self) -> list[Step]:
        """All that is in it."""
        own = [self.own] if self.own else []
        return [*own, *self.done, *(step for branch in self.inside.values() for step in branch.steps)]

    @property
    def is_one_call(self) -> bool:
        """Whether a line says it all: the node, and the only thing that was done for it."""
        return self.own is not None and len(self.done) == 1 and not self.inside


class _Line(msgspec.Struct, frozen=True):
    label: str
    status: Text
    began: int
    ended: int | None
    tokens: int
    attempt: int
    how: str
    """Its status, for the colour of its bar."""


def _lines(branch: _Branch, depth: int) -> Iterator[_Line]:
    """What is in the branch, in the order in which it began; elements in theirs."""
    below: list[tuple[tuple[int, int], Step | _Branch]] = [
        ((one["began_at"], one.get("seq") or 1 << 62), one) for one in branch.done
    ]
    for place, one in enumerate(branch.inside.values()):
        is_element = one.name.startswith("[")
        began = min(step["began_at"] for step in one.steps)
        below.append(((0, int(one.name[1:-1])) if is_element else (began, place), one))
    several = sum(step["kind"] == "model" for step in branch.done) > 1
    for _, one in sorted(below, key=lambda item: item[0]):
        if isinstance(one, _Branch):
            yield _line_of(one, depth)
            if not one.is_one_call:
                yield from _lines(one, depth + 1)
        else:
            number = f" {one['step']}" if several and one["kind"] == "model" else ""
            yield _line(f"{'  ' * depth}{_named(one)}{number}", one, _tokens([one]))


def _line_of(branch: _Branch, depth: int) -> _Line:
    indent = "  " * depth
    tokens = _tokens(branch.steps)
    if branch.own:
        call = f" {_named(branch.done[0])}" if branch.is_one_call else ""
        return _line(f"{indent}{_MARKS['node']} {branch.name}{call}", branch.own, tokens)
    steps = branch.steps
    ends = [step.get("ended_at") for step in steps]
    ended = None if None in ends else max(ends)
    began, attempt = min(step["began_at"] for step in steps), max(step["attempt"] for step in steps)
    how = "running" if ended is None else "interrupted" if _is_cut(steps) else "ok"
    return _Line(f"{indent}{branch.name}", Text(""), began, ended, tokens, attempt, how)


def _is_cut(steps: Sequence[Step]) -> bool:
    return any(step["status"] == "interrupted" for step in steps)


def _line(label: str, step: Step, tokens: int) -> _Line:
    port = step.get("port", "")
    status = styled(step["status"]) if port in ("", "out", "err") else Text(f"→ {port}", style="green")
    return _Line(label, status, step["began_at"], step.get("ended_at"), tokens, step["attempt"], step["status"])


def _tokens(steps: Sequence[Step]) -> int:
    used = [step.get("usage") or {} for step in steps]
    return sum(usage.get("input_tokens", 0) + usage.get("output_tokens", 0) for usage in used)


def _show_tree(out: Console, steps: Sequence[Step]) -> None:
    root = _Branch("")
    for step in steps:
        root.put(step)
    lines = list(_lines(root, 0))
    tries = len({line.attempt for line in lines}) > 1
    room = out.width - 34 - (5 if tries else 0)
    label = max(18, min(max(len(line.label) for line in lines), room - 12))
    axis = _Axis(steps, max(12, min(BAR, room - label)))
    grid = _grid(*(("try",) if tries else ()), "what", "status", "took", "tokens", width=label)
    grid.add_column(axis.title, no_wrap=True)
    for line in lines:
        bar = axis.bar(line.began, line.ended, line.how)
        took, tokens = _took(line.began, line.ended), f"{line.tokens:,}" if line.tokens else ""
        attempt = (str(line.attempt),) if tries else ()
        grid.add_row(*attempt, Text(line.label), line.status, took, tokens, bar)
    out.print(grid)
    for step in steps:
        if step["kind"] == "node" and (why := step.get("error") or step.get("note")):
            mark, style = ("✕", "red") if step.get("error") else ("·", "dim")
            out.print(Text(f"{mark} {step['path']}: {printable(why)}", style=style), soft_wrap=True)
