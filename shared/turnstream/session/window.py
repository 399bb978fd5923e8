"""How much of a session a model is shown: where the window begins, and what of the log has to be read for it.

The rule of `fit`. A window begins where that of the same model's last call began, which is in the log (`Window`), for
as long as what is behind that fits. When it fits no longer, it begins anew, so that half of the budget stays free
(`LOW`): whole turns go, the one that ended first before the others; of the turn that is under way, where it alone is
too much, the oldest replies, each with its results. So a prompt begins with all of the one before it, but for the few
calls at which a window begins anew, and a provider's cache hits.

Besides, what is shown is not more than `BYTES` of the log for each token of the budget, however few tokens it has: from
the fold alone is known from where on events are needed.

What fits is estimated (`tokens.py`), but for what the provider has counted: its number for the last call counts for
everything that was in it, and only what has come since is estimated.
"""

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

import msgspec

from turnstream.session.events import Window
from turnstream.session.policy import Policy
from turnstream.session.state import Compacted, Prompt, Run, Session
from turnstream.session.turns import Turn

LOW: Final = 1 / 2
"""Of the budget, what a window has at most when it begins anew."""
BYTES: Final = 48
"""Bytes of events for each token of the budget that are looked at, at most."""
RESERVE: Final = 8192
"""Tokens for the answer where the agent does not say how many it may have; never more than a quarter of everything."""
TRUST: Final = (1 / 4, 2)
"""A provider's count is taken for what it is between so many times our estimate: it may count what we do not know of,
or nothing."""


class Budget(msgspec.Struct, frozen=True):
    """What a prompt for a model may have: `tokens` in all, of which `fixed` are instructions and tools."""

    model: str
    tokens: int
    fixed: int = 0


def budget_of(model: str, context: int, *, answer: int | None = None, fixed: int = 0) -> Budget:
    """Of a model that takes `context` tokens, its answer of `answer` tokens included."""
    left = context - (min(RESERVE, context // 4) if answer is None else answer)
    return Budget(model, max(left, 0), fixed)


class Cut(msgspec.Struct, frozen=True):
    """Turns that ended before `since` are left out, turns of others that have not ended and began before it too, and so
    are replies before `inner`, with their results."""

    since: int = 0
    inner: int = 0


class Needs(msgspec.Struct, frozen=True):
    """What a window is built of: every event from `since` on, and those that are `beside`. `summary` and `plan` are the
    sequences of what holds the summary and the checklist, 0 for none; `newest_plan` that of the checklist where replies
    are left out that have changed it. `turns`: the runs that are shown, None for all that there are."""

    cut: Cut
    since: int
    summary: int = 0
    plan: int = 0
    newest_plan: int = 0
    turns: frozenset[int] | None = None

    @property
    def beside(self) -> tuple[int, ...]:
        return tuple(sorted({seq for seq in (self.summary, self.plan) if 0 < seq < self.since}))


def needs(session: Session, run: Run | None, policy: Policy, budget: Budget | None) -> Needs:
    """What the window of a call for this run is built of; None: of a run that would begin now."""
    cut = _cut(session, run, policy, budget)
    compacted = _compacted(session, policy)
    # What the run itself has changed since it began, it has said.
    own = run is not None and run.taken and run.n == session.plan_run and not cut.inner
    plan = run.plan_seq if run and own else session.plan_seq
    since, turns = first_shown(session, run, cut)
    return Needs(cut, since, compacted.seq if compacted else 0, plan, session.plan_seq, turns)


def to_sum_up(session: Session, through: int) -> Needs:
    """What a summary of everything up to the end of a turn, `through`, is made of: the turns since the last one, and
    that."""
    before = session.compacted
    turns = [turn for turn in turns_since(session, before.through + 1 if before else 0) if turn.end <= through]
    since = min([turn.seq for turn in turns], default=through)
    return Needs(Cut(), since, before.seq if before else 0, turns=frozenset([turn.run for turn in turns]))


def turns_since(session: Session, seq: int) -> Iterator[Turn]:
    """The turns that ended at this sequence or later, the newest first."""
    return takewhile(lambda turn: turn.end >= seq, reversed(session.turn_blocks))


def first_shown(session: Session, run: Run | None, cut: Cut) -> tuple[int, frozenset[int] | None]:
    """The sequence of the first event of everything that is shown behind a cut (0: the session's first), and the runs
    whose turns are shown (None: all)."""
    if not cut.since:
        return 0, None
    shown = {other.n: other.since for other in session.runs if other.since >= cut.since or other is run}
    shown |= {turn.run: turn.seq for turn in turns_since(session, cut.since)}
    return min(shown.values(), default=session.seq + 1), frozenset(shown)


def _compacted(session: Session, policy: Policy) -> Compacted | None:
    return session.compacted if policy.history_compaction == "on" else None


def _cut(session: Session, run: Run | None, policy: Policy, budget: Budget | None) -> Cut:
    compacted = _compacted(session, policy)
    front = Cut(compacted.through + 1 if compacted else 0)
    if budget is None or policy.history_window == "all":
        return front
    prompt = session.prompt(budget.model)
    # Where the model takes more now, the window is not kept small for what it was.
    if prompt and prompt.window.budget >= budget.tokens and prompt.window.since >= front.since:
        front = Cut(prompt.window.since, prompt.window.inner)
    return Cut(_within_bytes(session, run, front.since, budget.tokens * BYTES), front.inner)


def _within_bytes(session: Session, run: Run | None, since: int, limit: int) -> int:
    """Where a window begins that begins at `since`, or so much later that it has half of the limit."""
    size, half = run.size if run else 0, session.seq + 1
    if size + session.turn_blocks.size <= limit:
        return since
    for turn in turns_since(session, since):
        size += turn.size
        if size > limit:
            return half
        if size <= limit * LOW:
            half = turn.end
    return since


def measured(tokens: int, cut: Cut, budget: Budget, prompt: Prompt | None) -> int:
    """How many tokens a prompt has that we estimate at `tokens`: what was in the last one is as the provider counted
    it."""
    if prompt is None or not prompt.counted or Cut(prompt.window.since, prompt.window.inner) != cut:
        return tokens
    before = prompt.window.tokens
    if not before or prompt.window.fixed != budget.fixed:
        return tokens
    least, most = TRUST
    counted = min(max(prompt.counted, round(before * least)), before * most)
    return counted + tokens - before if tokens >= before else -(-tokens * counted // before)


def shown_as(cut: Cut, tokens: int, budget: Budget) -> Window:
    return Window(since=cut.since, inner=cut.inner, tokens=tokens, fixed=budget.fixed, budget=budget.tokens)
