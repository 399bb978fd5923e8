"""Writers that go on whatever dies, and what they were told. A message whose answer is lost is sent again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.support.asking import events, insist, opened
from tests.support.deployment import Deployment
from tests.support.follower import Follower, following
from tests.support.waiting import eventually

AHEAD = 2
"""How many messages of a session wait for their turn."""


class Load:
    """One writer and one follower a session. `prompt` says `{}` where the message's number belongs; its answer is that
    number."""

    def __init__(self, deployment: Deployment, sessions: Sequence[str], prompt: str) -> None:
        self.deployment = deployment
        self.sessions = sessions
        self.acknowledged: dict[str, dict[str, int]] = {name: {} for name in sessions}
        """By session and message: the sequence that was said."""
        self.followers: list[Follower] = []
        self._prompt = prompt
        self._writing: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()

    @property
    def count(self) -> int:
        return sum(map(len, self.acknowledged.values()))

    async def until(self, count: int, timeout: float = 120.0) -> None:
        """Waits for so many acknowledged messages. Raises what broke a writer."""
        await eventually(lambda: self.count >= count or any(task.done() for task in self._writing), timeout)
        for task in self._writing:
            if task.done():
                task.result()

    async def made_up(self, timeout: float = 120.0) -> dict[str, list[dict[str, Any]]]:
        """Ends the writing and waits for the end of every run. What was acknowledged is there, once, at the sequence
        that was said; every run has ended as it should, in order; followers hold the log. Answers with what is stored
        of each session."""
        self._over.set()
        await asyncio.gather(*self._writing)
        found: dict[str, list[dict[str, Any]]] = {}
        for follower in self.followers:
            acknowledged = self.acknowledged[follower.session]
            await follower.until("run.ended", count=len(acknowledged), timeout=timeout)
            stored = found[follower.session] = await events(self.deployment.apis[0], follower.session)
            posted = {
                event["data"]["message_id"]: event["seq"] for event in stored if event["type"] == "message.posted"
            }
            assert posted == acknowledged
            kinds = [event["type"] for event in stored]
            assert kinds.count("message.posted") == kinds.count("run.ended") == len(posted), "none twice"
            ends = [event["data"] for event in stored if event["type"] == "run.ended"]
            assert [end["content"] for end in ends] == [str(n) for n in range(1, len(posted) + 1)]
            assert follower.records == stored
        return found

    async def _write(self, follower: Follower) -> None:
        n = 0
        while not self._over.is_set():
            n += 1
            message = {"session": follower.session, "message_id": f"m{n}", "content": self._prompt.format(n)}
            answer = await insist(self.deployment.apis, "post_message", **message)
            assert answer.status in (200, 202), answer
            self.acknowledged[follower.session][f"m{n}"] = answer.body["seq"]
            await follower.until("run.ended", count=n - AHEAD, timeout=120)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator["Load"]:
        async with AsyncExitStack() as stack:
            for n, name in enumerate(self.sessions):
                await opened(self.deployment.nats, name, policy={"on_busy": "queue"})
                url = self.deployment.urls[n % len(self.deployment.urls)]
                self.followers.append(await stack.enter_async_context(following(name, url)))
            self._writing = [asyncio.create_task(self._write(follower)) for follower in self.followers]
            try:
                yield self
            finally:
                for task in self._writing:
                    task.cancel()
                await asyncio.gather(*self._writing, return_exceptions=True)
