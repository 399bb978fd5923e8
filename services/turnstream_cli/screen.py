"""A session's feed for people: what is said appears as it is said, every stored fact as one line.

Where the live text of a step was shown whole, the stored text is not shown again; where some of it was missed, the
stored one is shown: what is stored is what was said.

Of several nodes of a graph that speak at once, one is shown as it speaks; the others are kept until it has finished, so
that no two are mixed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from turnstream.ids import child_id
from turnstream_cli.follow import CaughtUp, Delta, Disconnected, Event, Item
from turnstream_cli.show import STYLES, attached, duration, printable
from turnstream_cli.voices import Voices

LINE = 100
"""Characters of what a node gives that a line shows."""
_TICKS = {"pending": "☐", "in_progress": "◐", "completed": "☑"}


class Screen:
    """Writes to a console. Events may be of types that this release does not know: they get a line all the same."""

    def __init__(self, console: Console, *, say: Callable[[str], None] | None = None) -> None:
        self._console = console
        self._say = say or (lambda text: console.print(f"… {text}", style="dim", markup=False))
        self._held: dict[int, list[dict[str, Any]]] = {}
        """Live text of runs whose start has not come yet: it is faster than what is stored."""
        self._over: dict[int, tuple[int, float]] = {}
        """By run: attempt and step of the last one that is stored."""
        self._open: tuple[str, str] | None = None
        """Kind of the live text that the cursor stands in, and the node whose it is."""
        self._run = 0
        self._attempt = 0
        self._step = 0
        self._index = 0
        self._known: dict[str, int] = {}
        """Messages that were shown, and the sequence of each: what a person can find again."""
        self._spoken = {"text": "", "reasoning": ""}
        """Live text of the current step, and reasoning; what differs from what is stored is shown from there."""
        self._voices = Voices()

    def show(self, item: Item) -> None:
        match item:
            case Event():
                self._event(item)
            case Delta():
                self._delta(item.record)
            case Disconnected():
                self._close()
                self._say(f"{item.reason}; connecting again at the last event")
            case CaughtUp():
                pass

    def finish(self) -> None:
        self._close()

    def know(self, message: str, seq: int) -> None:
        """A message that is not shown, but may be spoken of."""
        self._known[message] = seq

    def _named(self, messages: Iterable[str]) -> str:
        return ", ".join(f"#{self._known[name]}" if name in self._known else name for name in messages)

    def _delta(self, delta: dict[str, Any]) -> None:
        run, attempt, step = int(delta["run"].rpartition(".")[2]), int(delta["attempt"]), int(delta["step"])
        if run in self._held:
            self._held[run].append(delta)
            return
        if (attempt, step) <= self._over.get(run, (0, 0)):
            return  # what is stored of this step has been shown
        if delta.get("path"):
            self._delta_of_node(run, delta)
            return
        if (run, attempt, step) != (self._run, self._attempt, self._step):
            if run == self._run and (attempt, step) < (self._attempt, self._step):
                return  # an attempt that was given up still speaks
            self._close()
            if (run, attempt) != (self._run, self._attempt):
                self._index = 0
            self._run, self._attempt, self._step = run, attempt, step
            self._forget()
        if int(delta["index"]) <= self._index:
            return
        missed = int(delta["index"]) > self._index + 1
        self._index = int(delta["index"])
        match delta["kind"]:
            case "text" | "reasoning" as kind:
                self._live(kind, ("…" if missed else "") + delta["text"])
                self._spoken[kind] += ("\0" if missed else "") + delta["text"]
            case "reset":
                self._forget()
                self._line("↺", f"asked again ({delta['text']}); what was shown of this step is void", "yellow")
            case _:  # tool calls are shown by the events that store them
                pass

    def _delta_of_node(self, run: int, delta: dict[str, Any]) -> None:
        if not self._voices.hear(run, delta):
            return
        if delta["kind"] == "reset":
            void = f"asked again ({delta['text']}); what was shown of this step is void"
            self._line("↺", f"{delta['path']}: {void}", "yellow")
        self._let_speak()

    def _let_speak(self) -> None:
        for path, kind, text in self._voices.to_show():
            self._live(kind, text, path)

    def _said_by_node(self, data: dict[str, Any], text: str, step: float) -> None:
        """What is stored of what a node has said, as far as it was not shown."""
        path = data["path"]
        shown = self._voices.end(data["run"], path, (data["attempt"], step))
        said = (("◇", "reasoning", data.get("reasoning", ""), "dim italic"), ("◆", "text", text, ""))
        for mark, kind, stored, style in said:
            spoken = shown.get(kind, "")
            if spoken and stored.startswith(spoken):
                if stored != spoken:  # its end came too late to be heard
                    self._live(kind, stored[len(spoken) :], path)
            elif stored:
                self._line(mark, f"{path}: {stored}", style)
        self._close()

    def _live(self, kind: str, text: str, path: str = "") -> None:
        if self._open != (kind, path):
            self._close()
            of = f"{path}: " if path else ""
            self._console.print(Text(("◇ " if kind == "reasoning" else "◆ ") + of, style="dim"), end="")
            self._open = kind, path
        self._console.print(
            Text(printable(text), style="dim italic" if kind == "reasoning" else ""), end="", soft_wrap=True
        )

    def _close(self) -> None:
        if self._open:
            self._console.print()
            self._open = None

    def _line(self, mark: str, text: str, style: str = "", tail: str = "") -> None:
        self._close()
        line = Text(f"{mark} ", style="dim") + Text(printable(text), style=style)
        if tail:
            line += Text(f"  {printable(tail)}", style="dim")
        self._console.print(line, soft_wrap=True)

    def _said(self, data: dict[str, Any]) -> None:
        """The stored reasoning and text of a step, as far as they were not shown live."""
        for mark, kind, name, style in (("◇", "reasoning", "reasoning", "dim italic"), ("◆", "text", "content", "")):
            stored, spoken = data.get(name, ""), self._spoken[kind]
            if spoken and stored.startswith(spoken):
                if stored != spoken:  # its end came too late to be heard
                    self._live(kind, stored[len(spoken) :])
            elif stored:
                self._line(mark, stored, style)
        self._close()
        self._forget()

    def _forget(self) -> None:
        self._spoken = {"text": "", "reasoning": ""}

    def _event(self, event: Event) -> None:
        data, tail = event.data, f"#{event.seq}"
        match event.type:
            case "session.opened":
                self._line("○", "session opened", "dim", tail)
            case "session.updated":
                self._line("○", f"session updated: {', '.join(data)}", "dim", tail)
            case "session.deleted":
                self._line("○", "session deleted", "red", f"by {data.get('by', '')} {tail}")
            case "message.posted":
                self.know(data["message_id"], event.seq)
                text = "\n  ".join(part.get("text", "") for part in data.get("content", ()))
                self._line("▸", f"{data.get('author', '')}: {text}", "bold", f"{_routing(data)} {tail}")
                for one in data.get("attachments", ()):
                    self._line("▫", attached(one), "", tail)
                if routed := data.get("starts") or data.get("queued"):
                    self._held[routed["run"]] = []
                if interrupted := (data.get("queued") or {}).get("interrupts"):
                    self._line("✕", f"cancel of run {interrupted} asked for by it", "yellow", tail)
            case "message.withdrawn":
                self._line("▸", f"message {self._named((data['message_id'],))} withdrawn", "yellow", tail)
            case "run.requested":
                self._held[data["run"]] = []
                if action := data.get("action"):
                    said = f"{data.get('author', '')}: {action['name']}({action['arguments']})"
                    self._line("▸", said, "bold", f"{_went(data)} {tail}")
                else:
                    again = f", run {data['retry_of']} again" if data.get("retry_of") else ""
                    self._line("▸", f"run {data['run']} asked for{again}", "bold", tail)
            case "run.started":
                again = "" if data.get("trigger", "message") == "message" else f", {data['trigger']}"
                self._line("▶", f"run {data['run']} started", "cyan", f"attempt {data['attempt']}{again} {tail}")
                for delta in self._held.pop(data["run"], ()):
                    self._delta(delta)
            case "run.steered":
                self._line("▸", f"run {data['run']} takes {self._named(data['message_ids'])}", "cyan", tail)
            case "run.waiting":
                self._held[data["run"]] = []
                for request in for_people(data["requests"]):
                    self.request(request, tail)
                if parked := [request["prompt"] for request in data["requests"] if request["kind"] == "child"]:
                    self._line("⑂", f"run {data['run']} waits for {', '.join(parked)}", "magenta", tail)
            case "request.answered":
                self._line("?", *answered(data), f"by {data.get('by', '')} {tail}")
            case "request.expired":
                self._line("?", f"{data['request']}: nobody answered in time", "yellow", tail)
            case "run.released":
                self._line("▷", f"run {data['run']} handed over", "yellow", tail)
            case "model.replied":
                if data.get("path"):
                    self._said_by_node(data, data.get("content", ""), data["step"])
                else:
                    self._said(data)
                    self._over[data["run"]] = data["attempt"], data["step"]
                for call in data.get("tool_calls", ()):
                    self._line("⚙", f"{_of(data)}{call['name']}({call['arguments']})", "magenta", tail)
                self._let_speak()
            case "node.started":
                self._line("◈", *begun(data), tail)
            case "node.finished":
                self._finished(data, tail)
            case "tool.started":
                pass
            case "tool.returned":
                self._returned(data, tail)
            case "child.started":
                wait = "" if data.get("wait", True) else ", and goes on without it"
                name = f"{data['spec']['agent']} in {data['child_session']}"
                self._line("⑂", f"{_of(data)}run {data['run']} delegates to {name}{wait}", "magenta", tail)
            case "child.ended":
                self._child_ended(event, tail)
            case "run.reported":
                told = "is told" if data.get("told", True) else "is not there any more"
                self._line("⑂", f"whoever delegated run {data['run']} {told}", "dim", tail)
            case "plan.changed":
                self._plan(data, tail)
            case "run.cancel_requested":
                self._line("✕", f"cancel of run {data['run']} asked for", "yellow", f"by {data.get('by', '')} {tail}")
            case "run.ended":
                self._ended(data, tail)
            case _:
                self._line("·", event.type, "dim", tail)

    def _child_ended(self, event: Event, tail: str) -> None:
        data = event.data
        name = child_id(event.record["source"].rpartition("/")[2], data["run"], data["k"])
        error = data.get("error") or {}
        said = f"{error['code']}: {error['message']}" if error else data.get("output", "")
        late = ", late" if data.get("late") else ""
        usage = data.get("usage") or {}
        tokens = usage.get("input_tokens", 0) + usage.get("output_tokens", 0)
        text = f"{name} {data['status']}{late}{': ' if said else ''}{_cut(said)}"
        self._line("⑂", text, STYLES.get(data["status"], ""), f"{tokens} tokens {tail}")

    def _plan(self, data: dict[str, Any], tail: str) -> None:
        self._line("☰", "checklist", "bold", tail)
        for mark, text, style in checklist(data["items"]):
            self._line(f"  {mark}", text, style)

    def request(self, request: dict[str, Any], tail: str = "") -> None:
        """What a run waits for, as it is asked."""
        schema = f"  {msgspec.json.encode(request['schema']).decode()}" if request.get("schema") else ""
        choices = f"  ({' | '.join(request['choices'])})" if request.get("choices") else ""
        wants = "approve? " if request["kind"] == "approval" else ""
        text = f"{request['request']} {wants}{request['prompt']}{choices}{schema}"
        tail = f"{request['path']} {tail}".rstrip() if request.get("path") else tail
        self._line("?", text, "bold magenta", tail)

    def hint(self, command: str) -> None:
        """A command that goes on from here."""
        self._close()
        self._console.print(Text(f"  {printable(command)}", style="dim cyan"), soft_wrap=True)

    def _returned(self, data: dict[str, Any], tail: str) -> None:
        result = data.get("output") or data.get("error", "")
        self._line(
            "⚙",
            f"{_of(data)}→ {data['status']}: {_cut(result)}",
            STYLES.get(data["status"], ""),
            f"{duration(data.get('duration', 0))} {tail}",
        )

    def _finished(self, data: dict[str, Any], tail: str) -> None:
        """A node's end, and by which port. What its model said stands above; else what it gives is cut to a line."""
        text = data.get("output", "")
        is_text = bool(data.get("model")) and not data.get("json")
        if data.get("model"):
            self._said_by_node(data, text if is_text else "", math.inf)
        self._voices.leave(data["run"], data["path"])
        port, error = data.get("port", "out"), data.get("error", "")
        gives = error or ("" if is_text else _first_line(text))
        note = f" ({data['note']})" if data.get("note") else ""
        usage = data.get("usage") or {}
        tokens = usage.get("input_tokens", 0) + usage.get("output_tokens", 0)
        took = f"{duration(data['duration'])} " if data.get("duration") else ""
        used = f"{tokens} tokens " if tokens else ""
        line = f"{data['path']} → {port}{': ' if gives else ''}{gives}{note}"
        self._line("◈", line, "red" if port == "err" else "green", f"{used}{took}{tail}")
        self._let_speak()

    def _ended(self, data: dict[str, Any], tail: str) -> None:
        self._voices.forget(data["run"])
        self._said(data)
        self._over[data["run"]] = data.get("attempt", 0), math.inf
        self._held.pop(data["run"], None)
        error = data.get("error") or {}
        why = f": {error['code']}: {error['message'].removeprefix(error['code'] + ': ')}" if error else ""
        note = f" ({data['note']})" if data.get("note") else ""
        usage = data.get("usage") or {}
        tokens = usage.get("input_tokens", 0) + usage.get("output_tokens", 0)
        if blob := data.get("blob"):
            self._line("◆", f"(cut: the whole answer has {blob['size']} bytes)", "yellow")
        end = f"run {data['run']} {data['status']}{why}{note}"
        self._line("■", end, STYLES.get(data["status"], ""), f"{tokens} tokens {tail}")
        if left := data.get("leftover"):
            self._held[left["run"]] = []
            self._line(
                "▸", f"run {left['run']} takes what is left over: {self._named(left['message_ids'])}", "bold", tail
            )


def begun(data: dict[str, Any]) -> tuple[str, str]:
    """What a node begins with, and its style."""
    if call := data.get("call"):
        return f"{data['path']}: {call['name']}({call['arguments']})", "magenta"
    return f"{data['path']} × {data.get('items', 0)}", ""


def _of(data: dict[str, Any]) -> str:
    """The node that it belongs to, if it does."""
    return f"{data['path']}: " if data.get("path") else ""


def _first_line(text: str) -> str:
    line, _, more = text.partition("\n")
    return line if len(line) <= LINE and not more else f"{line[:LINE]} …"


def for_people(requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what a run waits for, what a person is asked; the rest are its sub-agents."""
    return [request for request in requests if request["kind"] != "child"]


def checklist(items: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Mark, text and style of each item."""
    for item in items:
        status = item.get("status", "pending")
        yield _TICKS.get(status, "·"), item["text"], "dim" if status == "completed" else ""


def answered(data: dict[str, Any]) -> tuple[str, str]:
    """What was said to a request, and its style."""
    match data.get("approved"):
        case None:
            said = msgspec.json.encode(data.get("answer")).decode()
            return f"{data['request']} answered: {said}", "green"
        case True:
            return f"{data['request']} approved", "green"
        case _:
            return f"{data['request']} denied{': ' + data['reason'] if data.get('reason') else ''}", "yellow"


def _cut(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + " …"


def _went(data: dict[str, Any]) -> str:
    return f"{'queued as' if data.get('queued') else 'starts'} run {data['run']}"


def _routing(data: dict[str, Any]) -> str:
    for how in ("starts", "steers", "answers"):
        if data.get(how):
            return f"{how} run {data[how]['run']}"
    if data.get("queued"):
        return f"queued as run {data['queued']['run']}"
    return "a notice" if data.get("kind") == "notice" else "starts nothing: its author may not"
