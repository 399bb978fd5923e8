"""A run's waterfall in a terminal: a list, or a tree of nodes; in any width, without colours in a pipe."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from turnstream_cli import waterfall

BEGIN = 1_700_000_000_000


def step(kind: str, path: str, name: str, began: int, ended: int | None, status: str = "ok", **more: Any) -> Any:
    """A step as the API gives it; times are milliseconds from the run's begin."""
    of = {"path": path, "node": path.rpartition(".")[2]} if path else {}
    over = {} if ended is None else {"ended_at": BEGIN + ended, "seq": ended}
    stands = {"kind": kind, "name": name, "status": status, "attempt": 1, "step": 1, "began_at": BEGIN + began}
    return {**stands, **of, **over, **more}


def node(path: str, began: int, ended: int | None, status: str = "ok", **more: Any) -> Any:
    return step("node", path, path.rpartition(".")[2], began, ended, status, **{"port": "out" if ended else "", **more})


def used(tokens: int) -> dict[str, Any]:
    return {"usage": {"input_tokens": tokens - 1, "output_tokens": 1}}


STEPS = [
    node("question", 1, 1),
    node("sort", 2, 2, port="bug"),
    step("tool", "look", "count_words", 3, 300),
    node("look", 3, 300),
    step("model", "each[0].draft", "demo", 310, 900, **used(1200)),
    step("tool", "each[0].draft", "add", 900, 950),
    step("model", "each[0].draft", "demo", 960, 1900, step=2, **used(1500)),
    node("each[0].draft", 310, 1900),
    step("model", "each[10].draft", "demo", 320, 1200, **used(900)),
    node("each[10].draft", 320, 1200, "error", port="err", error="no\x1b[2J reply"),
    step("wait", "each[2].again[0].ok", "question", 400, None, "waiting"),
    node("each[2].again[0].ok", 380, None, "waiting"),
    node("each[2].again", 370, None, "running"),
    node("each", 305, None, "running"),
]


def shown(steps: list[Any], width: int = 80, **of: Any) -> str:
    out = io.StringIO()
    waterfall.show(Console(file=out, width=width, highlight=False, **of), steps)
    return out.getvalue()


def test_a_run_without_a_graph_is_a_list() -> None:
    steps = [step("tool", "", "add", 100, 200), step("model", "", "demo", 0, 100)]
    lines = shown(steps).splitlines()
    assert [line.split()[:6] for line in lines[1:]] == [
        ["1", "1", "◆", "demo", "ok", "100"],
        ["1", "1", "⚙", "add", "ok", "100"],
    ]
    assert shown([]) == "no steps yet\n"


def test_a_run_of_a_graph_is_a_tree_of_nodes_elements_and_what_was_done_for_each() -> None:
    lines = shown(STEPS).splitlines()
    assert [line[:33].rstrip() for line in lines] == [
        "what                     status",
        "◈ question               ok",
        "◈ sort                   → bug",
        "◈ look ⚙ count_words     ok",
        "◈ each                   running",
        "  [0]",
        "    ◈ draft              ok",
        "      ◆ demo 1           ok",
        "      ⚙ add              ok",
        "      ◆ demo 2           ok",
        "  [2]",
        "    ◈ again              running",
        "      [0]",
        "        ◈ ok ? question  waiting",
        "  [10]",
        "    ◈ draft ◆ demo       error",
        "✕ each[10].draft: no␛[2J reply",
    ]


def test_tokens_add_up_and_none_is_counted_twice() -> None:
    lines = shown(STEPS).splitlines()
    tokens = {re.split("  +", line.strip())[0]: line for line in lines}
    for what, count in (("◈ each", "3,600"), ("◈ draft ◆ demo", "900"), ("◈ draft", "2,700"), ("[10]", "900")):
        assert f" {count} " in tokens[what], what


@pytest.mark.parametrize("width", [80, 100, 160, 240])
def test_it_fits_into_any_width_and_a_pipe_gets_no_colours(width: int) -> None:
    text = shown(STEPS, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    assert max(line.count("━") for line in text.splitlines()) >= 12
    assert "\x1b" in shown(STEPS, width, force_terminal=True)


def test_bars_lie_where_things_were_done() -> None:
    lines = shown(STEPS, 160).splitlines()
    axis = lines[0].index("0 …")
    draft, second = (next(line for line in lines if what in line) for what in ("◈ draft  ", "◆ demo 2"))
    begins = [line.index("━") - axis for line in (draft, second)]
    assert begins == [int(310 * 60 / 1899), int(960 * 60 / 1899)] or begins == pytest.approx([9, 30], abs=1)
    assert second.rstrip().endswith("━"), "it ends with the run"


def test_attempts_are_told_where_there_were_several_and_long_names_are_cut() -> None:
    long = "summarize_everything_that_there_is"
    steps = [node("q", 1, 1), step("child", long, "painter", 5, 90, attempt=2, child_run="s1--1-1.1")]
    lines = shown([*steps, node(long, 5, 90, attempt=2)]).splitlines()
    assert [line.split()[0] for line in lines] == ["try", "1", "2"]
    assert "…" in lines[2] and max(len(line) for line in lines) <= 80
    assert "s1--1-1.1" in shown([*steps, node(long, 5, 90, attempt=2)], 160)
