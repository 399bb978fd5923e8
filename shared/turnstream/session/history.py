"""From events to what the model sees. One builder, a pure function of the session, its events, the policy and the
budget: `build`.

What of a session's story (`story.py`) is there: everything, or, where the policy remembers only completed turns, what
was said to these and what they answered, verbatim. Each tool result stands directly behind the reply that asked for
it; a call that has none yet shows a placeholder that is never stored. Reasoning and errors never appear. What is shown
of a turn only while it is under way, the checklist and what the sender's window showed, stands behind everything that
stays. Where the window begins is said in `window.py`; what was summed up (`history.compacted`) is there as its summary.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple, cast

import msgspec

from turnstream.session import tokens, window
from turnstream.session.events import (
    Blob,
    Fact,
    HistoryCompacted,
    PlanChanged,
    Recorded,
    ToolCall,
    Unknown,
    Window,
)
from turnstream.session.frames import frame
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage, cut
from turnstream.session.policy import STRICT, Policy
from turnstream.session.state import Run, Session
from turnstream.session.story import RESULT_MAX, Reply, Story, Turn
from turnstream.session.window import Budget, Cut, Needs, needs

RUNNING = '{"status":"running"}'
"""What a call shows that has no result yet; one that is for a sub-agent names its session, too."""
INTERRUPTED = "interrupted: there is no result"
"""What a call shows whose turn ended without its result."""
IN_DOUBT = "interrupted: there is no result, and the tool may or may not have taken effect"
"""The same where the tool had begun."""

NO_OUTPUT = "no_output"
"""How a run of a graph finishes that has come to nothing."""
EMPTY = ("length", "content_filter", NO_OUTPUT)
"""How a turn finished whose answer is empty by rule: its model has run out of tokens, or was not let speak, or nothing
has reached the output of its graph."""

Tools = Literal["bounded", "full", "none"]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a model sees. `window` says where it begins, `since` is the sequence of the first event of it (0: the
    session's first), `tokens` what it has, as far as is known. `replies`: the run's own that are in it. `fits`: else
    what has to be there is more than the budget."""

    messages: tuple[Message, ...]
    window: Window
    since: int = 0
    tokens: int = 0
    replies: tuple[int, ...] = ()
    fits: bool = True


class _Group(msgspec.Struct, frozen=True):
    """Messages that are not parted. `reply` is the sequence of their reply, 0 for what was said to it and its end."""

    reply: int
    messages: list[Message]
    tokens: int


class _Part(msgspec.Struct, frozen=True, gc=False):
    """What a turn shows. `key`: the order in which turns are left out."""

    key: int
    groups: list[_Group]
    messages: list[Message]
    tokens: int


class Prompt(msgspec.Struct, frozen=True):
    """What the model of the node at `path` is asked, in place of the turn's messages; `alone`: and nothing else."""

    path: str
    text: str
    alone: bool = False


def build(
    session: Session,
    events: Sequence[Recorded],
    run: int | None = None,
    policy: Policy = STRICT,
    budget: Budget | None = None,
    story: Story | None = None,
    prompt: Prompt | None = None,
) -> View:
    """What the model sees of the session, oldest first. With `run`, that run's turn is last: its prompt and its steps
    so far, whatever other runs have started since; with `prompt`, those of one node of its graph. `events` are those
    that `needs` names, or more. `story` is what they tell, where it has been told before."""
    now = session.run(run) if run is not None else None
    wanted = needs(session, now, policy, budget)
    draft = _Draft(session, policy, run, wanted, prompt)
    draft.take(events, story or told(session, events, policy, wanted.since))
    return draft.view() if budget is None else draft.fitted(budget)


def told(session: Session, events: Iterable[Recorded], policy: Policy, since: int) -> Story:
    """What these events tell, from the one with sequence `since` on."""
    story = Story(policy, session.several_since)
    for recorded in events:
        if recorded.seq >= since:
            story.hear(recorded)
    return story


def summed_up(
    session: Session, events: Iterable[Recorded], through: int, policy: Policy, most: int
) -> tuple[int, tuple[Message, ...]]:
    """What a summary of everything up to the end of a turn is made of, and which end that is: `through`, or an earlier
    one where that is more than so many tokens. `events` are those that `window.to_sum_up` names, or more."""
    wanted = window.to_sum_up(session, through)
    story = Story(policy, session.several_since)
    front: list[Message] = []
    for recorded in events:
        data = recorded.event.data
        if recorded.seq == wanted.summary and isinstance(data, HistoryCompacted):
            front.append(UserMessage(frame("summary", data.summary)))
        if wanted.since <= recorded.seq <= through:
            story.hear(recorded)
    pairs = policy.history_turns == "completed"
    parts = [
        _part(turn.ended, _pair(turn) if pairs else _groups(turn, turn.items, "bounded", 0))
        for n, turn in story.turns.items()
        if wanted.turns and n in wanted.turns and not _is_void(turn)
    ]
    for end in [turn.end for turn in session.borders() if wanted.since < turn.end <= through]:
        through = end
        if tokens.of_messages(front) + sum([part.tokens for part in parts if part.key <= end]) <= most:
            break
    return through, (*front, *(message for part in parts if part.key <= through for message in part.messages))


class _How(NamedTuple):
    """What decides on what another turn shows."""

    turns: Literal["all", "completed"]
    tools: Tools
    inner: int


class _Draft:
    def __init__(self, session: Session, policy: Policy, run: int | None, wanted: Needs, prompt: Prompt | None) -> None:
        self._session = session
        self._prompt = prompt
        self._policy = policy
        self._run = run
        self._wanted = wanted
        self._cut = wanted.cut
        self.summary: list[Message] = []
        self.plan: list[Message] = []
        self.newest_plan: list[Message] = []
        self.others: list[_Part] = []
        self.own = _part(session.seq + 1, ())

    def take(self, events: Sequence[Recorded], story: Story) -> None:
        wanted, run, policy = self._wanted, self._run, self._policy
        if self._prompt and self._prompt.alone:
            self.own = _part(self.own.key, [_group(0, [UserMessage(self._prompt.text)])])
            return
        self.plan = _plan_state(_at(events, wanted.plan))
        self.newest_plan = _plan_state(_at(events, wanted.newest_plan))
        summary = _at(events, wanted.summary)
        if isinstance(summary, HistoryCompacted):
            self.summary = [UserMessage(frame("summary", summary.summary))]
        begun = {other.n: other.since for other in self._session.runs}
        how = _How(policy.history_turns, policy.history_tools, self._cut.inner)
        shown = [
            # A long session has many turns, and nearly all of them have ended.
            cast("_Part", turn.shown[1]) if turn.shown and turn.shown[0] == how else _shown(turn, how, begun)
            for n, turn in story.turns.items()
            if n != run and (wanted.turns is None or n in wanted.turns)
        ]
        self.others = [part for part in shown if part.messages]
        if policy.history_turns == "completed":
            self.others.sort(key=lambda part: part.key)
        own = story.turns.get(run) if run is not None else None
        if own:
            tools = "full" if policy.history_tools == "full" else "bounded"
            seen = [_group(0, [*own.window])] if own.window else []
            items = own.items if self._prompt is None else _asked(own, self._prompt)
            self.own = _part(self.own.key, [*seen, *_groups(own, items, tools, self._cut.inner)])

    def view(self, fixed: int = 0) -> View:
        """Everything that was taken."""
        messages = chain.from_iterable([part.messages for part in self.others])
        since, _ = window.first_shown(self._session, self._now, self._cut)
        return View(
            messages=(*self.summary, *messages, *self.plan, *self.own.messages),
            window=Window(since=self._cut.since, inner=self._cut.inner),
            since=since,
            tokens=self._tokens(fixed),
            replies=tuple([group.reply for group in self.own.groups if group.reply]),
        )

    def fitted(self, budget: Budget) -> View:
        """As much of it as the budget allows, and what it has to begin with where that is not all."""
        estimate = self._tokens(budget.fixed)
        size = window.measured(estimate, self._cut, budget, self._session.prompt(budget.model))
        fits = True
        if size > budget.tokens and self._policy.history_window == "fit":
            most = budget.tokens * estimate // max(size, 1)
            fits = self._shorten(budget.fixed, most)
            size = size * self._tokens(budget.fixed) // max(estimate, 1)
        shown = self.view(budget.fixed)
        seen = window.shown_as(self._cut, shown.tokens, budget)
        return msgspec.structs.replace(shown, window=seen, tokens=size, fits=fits)

    def _shorten(self, fixed: int, most: int) -> bool:
        """Leaves out whole turns, then the oldest replies of the run's own turn, then the summary and the checklist.
        False: it is too much all the same. `most` is in our own estimate."""
        low = int(most * window.LOW)
        room = low - self._tokens(fixed, self.own.groups)
        kept: list[_Part] = []
        for part in sorted(self.others, key=lambda part: part.key, reverse=True):
            if part.tokens > room and (kept or part.tokens > room + most - low):
                break
            kept.append(part)
            room -= part.tokens
        self.others = [part for part in self.others if any(part is other for other in kept)]
        since = kept[-1].key if kept else self._session.seq + 1
        self._cut = Cut(max(since, self._cut.since), self._cut.inner)
        if self._tokens(fixed) > most:
            self._shorten_own(fixed, low)
        for left_out in (self.summary, self.plan):
            if self._tokens(fixed) > most:
                left_out.clear()
        return self._tokens(fixed) <= most

    def _shorten_own(self, fixed: int, low: int) -> None:
        groups = self.own.groups
        replies = [group for group in groups if group.reply]
        room = low - self._tokens(fixed, [group for group in groups if not group.reply])
        oldest = self._cut.inner
        for place, group in enumerate(reversed(replies)):
            if place and group.tokens > room:
                break
            room -= group.tokens
            oldest = group.reply
        self._cut = Cut(self._cut.since, oldest)
        self.plan = self.newest_plan
        self.own = _part(self.own.key, [group for group in groups if not 0 < group.reply < oldest])

    def _tokens(self, fixed: int, groups: list[_Group] | None = None) -> int:
        """Of everything, or of these groups and what is always there."""
        always = fixed + tokens.of_messages(self.summary) + tokens.of_messages(self.plan)
        if groups is None:
            return always + self.own.tokens + sum([part.tokens for part in self.others])
        return always + sum([group.tokens for group in groups])

    @property
    def _now(self) -> Run | None:
        return self._session.run(self._run) if self._run is not None else None


def _shown(turn: Turn, how: _How, begun: Mapping[int, int]) -> _Part:
    """What another turn shows. Of one that has ended it is remembered."""
    if _is_void(turn):
        groups: Iterable[_Group] = ()
    elif how.turns == "completed":
        groups = _pair(turn)
    else:
        groups = _groups(turn, turn.items, how.tools, how.inner)
    part = _part(turn.ended or begun.get(turn.n, turn.began), groups)
    if turn.end:
        turn.shown = how, part
    return part


def _part(key: int, groups: Iterable[_Group]) -> _Part:
    found = list(groups)
    messages = [message for group in found for message in group.messages]
    return _Part(key, found, messages, sum([group.tokens for group in found]))


def _at(events: Sequence[Recorded], seq: int) -> Fact | Unknown | None:
    """What the event at this sequence says, if it is among these; 0: none."""
    place = bisect_left(events, seq, key=lambda recorded: recorded.seq) if seq else len(events)
    return events[place].event.data if place < len(events) and events[place].seq == seq else None


def _plan_state(plan: Fact | Unknown | None) -> list[Message]:
    if not isinstance(plan, PlanChanged) or not plan.items:
        return []
    lines = [f"- [{item.status}] {item.id}: {item.text}" for item in plan.items]
    return [UserMessage(frame("plan_state", "\n".join(["", *lines, ""])))]


def _pair(turn: Turn) -> Iterator[_Group]:
    """What was said to a turn and what it answered, verbatim, if it came to an answer."""
    answer = _answer(turn)
    if turn.end and turn.end.status == "completed" and answer:
        said = [item for item in turn.items if isinstance(item, UserMessage)]
        yield _group(0, [*said, AssistantMessage(answer)])


def _is_void(turn: Turn) -> bool:
    """Whether a turn came to nothing for how its model finished: then it is none."""
    end = turn.end
    empty = end is not None and end.status == "completed" and end.finish in EMPTY and not turn.replies
    return empty and not _answer(turn)


def _answer(turn: Turn) -> str:
    return _whole(turn.end.content, turn.end.blob) if turn.end and not turn.action else ""


def _asked(turn: Turn, prompt: Prompt) -> list[UserMessage | Reply]:
    """What a node's model is asked, with everything that came with the turn's messages, and what it has replied."""
    attached = [one for item in turn.items if isinstance(item, UserMessage) for one in item.attachments]
    return [UserMessage(prompt.text, tuple(attached)), *turn.nodes.get(prompt.path, [])]


def _groups(turn: Turn, items: list[UserMessage | Reply], tools: Tools, inner: int) -> Iterator[_Group]:
    answer = _answer(turn)
    if items and answer and isinstance(last := items[-1], Reply) and _is_answer(last):
        items = items[:-1]
    for item in items:
        match item:
            case UserMessage():
                yield _group(0, [item])
            case Reply():
                if item.seq >= inner and (messages := list(_exchange(item, tools))):
                    yield _group(item.seq, messages)
    if answer:
        yield _group(0, [AssistantMessage(answer)])


def _is_answer(reply: Reply) -> bool:
    """Whether the newest reply of a turn that has an answer is that answer."""
    return not reply.replied.tool_calls and not reply.replied.misfit


def _group(reply: int, messages: list[Message]) -> _Group:
    return _Group(reply, messages, tokens.of_messages(messages))


def _exchange(reply: Reply, tools: Tools) -> Iterator[Message]:
    """A reply with its results, or with why it is none."""
    replied = reply.replied
    text = _whole(replied.content, replied.blob)
    calls = () if tools == "none" else replied.tool_calls
    if text or calls:
        yield AssistantMessage(text, calls)
    for call in calls:
        yield _result(call, reply, bounded=tools == "bounded")
    if replied.misfit:
        yield UserMessage(frame("misfit", f"{replied.misfit}: answer again"))


def _result(call: ToolCall, reply: Reply, *, bounded: bool) -> ToolMessage:
    returned = reply.results.get(call.id)
    if returned is None:
        missing = IN_DOUBT if call.id in reply.begun else INTERRUPTED
        return ToolMessage(call.id, call.name, missing if reply.over else _running(call, reply), reply.over)
    text = returned.output if returned.status == "ok" else f"{returned.status}: {returned.error}"
    text = cut(text, RESULT_MAX) if bounded else text
    return ToolMessage(call.id, call.name, _whole(text, returned.blob), returned.status != "ok")


def _running(call: ToolCall, reply: Reply) -> str:
    session = reply.children.get(call.id)
    return RUNNING if session is None else msgspec.json.encode({"status": "running", "session": session}).decode()


def _whole(head: str, blob: Blob | None) -> str:
    return f"{head}\n[cut: the whole has {blob.size} bytes]" if blob else head
