"""The little language of the demo model: what a prompt asks for, as data. What the words mean is in `demo.py`.

`[` and the name of a directive make one; any other bracket is text. `[then]` parts the steps. A directive that cannot
be read is a fault, which the model says instead of an answer.
"""

import json
import re
from typing import Any

import msgspec

from turnstream.session.events import ASK_USER, DELEGATE, UPDATE_PLAN

SIZE_MAX = 8 << 20
WORDS_MAX = 100_000
SECONDS_MAX = 3600.0
ALWAYS = 1 << 30

_DIRECTIVE = re.compile(
    r"\[(say|think|tool|loop|ask|delegate|plan|then|slow|wait|hang|fail|drop|empty|cut|size|unicode|opaque|attachments"
    r"|read|about|help)(?=[\s\]])"
)
_DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m)")
_SIZE = re.compile(r"([0-9]{1,9})(B|KB|MB)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20}
_MARKS = {"x": "completed", ">": "in_progress"}
_JSON = json.JSONDecoder()


class Asked(msgspec.Struct, frozen=True):
    """A tool to ask for; `arguments` is JSON text."""

    name: str
    arguments: str


class Failure(msgspec.Struct, frozen=True):
    """The provider's status, on how many tries, and how many seconds it asks to be left alone."""

    status: int = 400
    tries: int = ALWAYS
    retry_after: float | None = None


class Step(msgspec.Struct, kw_only=True):
    """One model call. `text` is what was said beside the directives."""

    text: str = ""
    say: str | None = None
    think: str = ""
    tools: list[Asked] = []
    loop: bool = False
    pace: float | None = None
    words: int | None = None
    size: int | None = None
    unicode: bool = False
    opaque: bool = False
    attachments: bool = False
    read: str = ""
    about: bool = False
    help: bool = False
    empty: bool = False
    wait: float = 0.0
    hang: bool = False
    stall: bool = False
    cut: int | None = None
    failure: Failure | None = None
    drop: int = 0
    faults: list[str] = []


def parse(prompt: str) -> list[Step]:
    """The steps that a prompt asks for, at least one."""
    steps = [Step()]
    texts: list[list[str]] = [[]]
    at = 0
    while found := _DIRECTIVE.search(prompt, at):
        texts[-1].append(prompt[at : found.start()])
        name, argument, at = _argument(prompt, found)
        if name == "then":
            steps.append(Step())
            texts.append([])
            continue
        try:
            _apply(steps[-1], name, argument)
        except ValueError as error:
            steps[-1].faults.append(f"{prompt[found.start() : at][:200]}: {error}")
    texts[-1].append(prompt[at:])
    for step, text in zip(steps, texts, strict=True):
        step.text = " ".join("".join(text).split())
    return steps


def _argument(prompt: str, found: re.Match[str]) -> tuple[str, str, int]:
    """Name, argument and end of a directive. Brackets and JSON strings inside it are balanced."""
    depth, quoted, at = 1, False, found.end()
    is_json = found[1] in ("tool", "loop")
    while at < len(prompt):
        character = prompt[at]
        is_json = is_json or (character == "{" and found[1] == "ask")
        if is_json and quoted:
            at += character == "\\"
            quoted = character != '"'
        elif is_json and character == '"':
            quoted = True
        elif character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
            if not depth:
                return found[1], prompt[found.end() : at].strip(), at + 1
        at += 1
    return found[1], prompt[found.end() :].strip(), len(prompt)


def _apply(step: Step, name: str, argument: str) -> None:
    words = argument.split()
    match name, words:
        case "say", _:
            step.say = argument
        case "think", _:
            step.think = f"{step.think}\n{argument}".strip()
        case "tool" | "loop", _:
            step.tools.append(_tool(argument))
            step.loop = step.loop or name == "loop"
        case "ask", _:
            step.tools.append(_question(argument))
        case "delegate", _:
            step.tools.append(_order(argument))
        case "plan", _:
            step.tools.append(_checklist(argument))
        case "slow", [duration]:
            step.pace = _seconds(duration)
        case "slow", [count, duration]:
            step.words, step.pace = _count(count, WORDS_MAX), _seconds(duration)
        case "wait", [duration]:
            step.wait = _seconds(duration)
        case "hang", []:
            step.hang = True
        case "hang", ["late"]:
            step.stall = True
        case "fail", _ if len(words) <= 3:
            step.failure = _failure(words)
        case "drop", []:
            step.drop = 1
        case "drop", [count]:
            step.drop = _tries(count)
        case "cut", [count]:
            step.cut = _count(count, WORDS_MAX)
        case "size", [size]:
            step.size = _size(size)
        case "empty", []:
            step.empty = True
        case "unicode", []:
            step.unicode = True
        case "opaque", []:
            step.opaque = True
        case "attachments", []:
            step.attachments = True
        case "read", [_, *_]:
            step.read = argument
        case "about", []:
            step.about = True
        case "help", []:
            step.help = True
        case _:
            raise ValueError("it is written otherwise; [help] says how")


def _tool(argument: str) -> Asked:
    name, _, rest = argument.partition(" ")
    if not name:
        raise ValueError("it names no tool")
    text = rest.strip()
    if not text:
        return Asked(name, "{}")
    return Asked(name, text[: _object(text)[1]])


def _question(argument: str) -> Asked:
    text, brace, rest = argument.partition("{")
    options = _object(brace + rest)[0] if brace else {}
    return Asked(ASK_USER, json.dumps({"question": text.strip(), **options}, ensure_ascii=False))


def _order(argument: str) -> Asked:
    """What is said of it, and the object that ends it; one inside the brief's own brackets is the brief's."""
    order: dict[str, Any] = {"brief": argument}
    for found in re.finditer(r"(?<!\S){", argument):
        try:
            options = _object(argument[found.start() :])[0]
        except ValueError:
            continue
        order = {"brief": argument[: found.start()].strip(), **options}
        break
    return Asked(DELEGATE, json.dumps(order, ensure_ascii=False))


def _checklist(argument: str) -> Asked:
    items: list[dict[str, str]] = []
    for part in argument.split("|"):
        mark, _, rest = part.strip().partition(" ")
        status = _MARKS.get(mark)
        text = rest.strip() if status else part.strip()
        if not text:
            raise ValueError("an item of it is empty")
        items.append({"text": text, "status": status or "pending"})
    return Asked(UPDATE_PLAN, json.dumps({"items": items}, ensure_ascii=False))


def _object(text: str) -> tuple[dict[str, Any], int]:
    """The JSON object that a text is, and where it ends."""
    try:
        value, end = _JSON.raw_decode(text)
    except ValueError as error:
        raise ValueError(f"its arguments are not JSON: {error}") from None
    if text[end:].strip() or not isinstance(value, dict):
        raise ValueError("its arguments are not one JSON object")
    return value, end


def _failure(words: list[str]) -> Failure:
    status = _count(words[0], 599) if words else 400
    if not 400 <= status <= 599:
        raise ValueError("a status is 400 to 599")
    tries = _tries(words[1]) if len(words) > 1 else ALWAYS
    return Failure(status, tries, _seconds(words[2]) if len(words) > 2 else None)


def _tries(word: str) -> int:
    return ALWAYS if word == "always" else _count(word, 1000)


def _count(word: str, most: int) -> int:
    if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) <= most):
        raise ValueError(f"{word!r} is no number up to {most}")
    return int(word)


def _seconds(word: str) -> float:
    found = _DURATION.fullmatch(word)
    seconds = float(found[1]) * _UNITS[found[2]] if found else -1.0
    if not 0 <= seconds <= SECONDS_MAX:
        raise ValueError(f"{word!r} is no duration like 50ms, 2s or 1m, up to an hour")
    return seconds


def _size(word: str) -> int:
    found = _SIZE.fullmatch(word)
    size = int(found[1]) * int(_UNITS[found[2]]) if found else -1
    if not 0 <= size <= SIZE_MAX:
        raise ValueError(f"{word!r} is no size like 500, 64KB or 8MB, up to 8MB")
    return size
