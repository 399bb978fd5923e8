"""What reaches the nodes of one attempt's graph, and what they have given.

Nothing is known here that is not in the log: what a node has given is read from its `node.finished`, and whatever is
made of that is made again in the same way by the next attempt.
"""

import json
from asyncio import to_thread
from collections.abc import Mapping, Sequence
from typing import Final

from turnstream.agents import evaluate
from turnstream.agents.evaluate import Scope, Unfit
from turnstream.agents.nodes import MapNode, Node
from turnstream.session.events import Blob, MessagePosted, NodeFinished
from turnstream.session.graph import ERR, Graph, Walk
from turnstream.session.messages import text_of
from turnstream.session.paths import around, name_of, outer_of
from turnstream.session.state import Run, Visit
from turnstream.wire.blobs import BlobLost, Blobs
from turnstream_runner.ledger import Ledger, persist

ITEMS_MAX: Final = 1000
"""Elements that a map goes through."""


class Reach:
    """Of one attempt, which holds what others need. `nodes` are those of the definition, by name."""

    def __init__(self, ledger: Ledger, blobs: Blobs, run: Run, graph: Graph, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self._ledger = ledger
        self._blobs = blobs
        self._run = run
        self._graph = graph
        self._given: dict[str, object] = {}
        self._lists: dict[str, Sequence[object]] = {}
        """What maps go through. Both by path."""

    @property
    def run(self) -> Run:
        """As it stands, or stood when it ended."""
        self._run = self._ledger.session.run(self._run.n) or self._run
        return self._run

    @property
    def visits(self) -> Mapping[str, Visit]:
        return {visit.path: visit for visit in self.run.visits}

    # --- what is inside of a map or a loop --------------------------------------------------------------------------

    async def failure(self, path: str, i: int) -> str:
        """Why one way through the graph inside a node has failed, empty if it has not."""
        walk = self._inside(path, i)
        for node in walk.failed():
            return await self._error(walk.path(node))
        return ""

    async def came_of(self, path: str, i: int) -> object:
        """What one way through the graph inside a node gave, as far as it has come."""
        walk = self._inside(path, i)
        for node in walk.outputs:
            if walk.state(node) == "finished":
                return await self._gave(walk.path(node))
        return None

    def _inside(self, path: str, i: int) -> Walk:
        inside = self._graph.node(path).graph
        assert inside is not None
        return Walk(inside, self.visits, f"{path}[{i}].")

    # --- what reaches them ------------------------------------------------------------------------------------------

    async def scope(self, path: str) -> Scope:
        key, run = self._ledger.key, self.run
        visits, nodes = self.visits, dict[str, object]()
        for outer in ("", *[f"{node}[{i}]." for node, i in around(path).items()]):
            for node in self._graph.holding(f"{outer}_").nodes:
                visit = visits.get(outer + node.id)
                if visit and visit.port:
                    nodes[node.id] = await self._gave(visit.path)
        session = {"account": key.account, "id": key.session, "run": key.run(run.n), "author": run.author}
        return Scope(input=await self.arrived(path), nodes=nodes, session=session)

    async def arrived(self, path: str) -> object:
        outer = outer_of(path)
        edges = self._graph.holding(path).edges_to(name_of(path))
        if not edges:
            return await self._put_in(path)
        walk = Walk(self._graph.holding(path), self.visits, outer)
        delivered = [edge for edge in edges if walk.delivers(edge)]
        if edges[0].into == "all":
            return {edge.source: await self._gave(outer + edge.source) for edge in delivered}
        return await self._gave(outer + delivered[0].source)

    async def _put_in(self, path: str) -> object:
        """What the input node of a graph is given: what the run was asked, an element, what came of the iteration
        before."""
        inside = around(path)
        if not inside:
            return await self._asked()
        outer, number = inside.popitem()
        node = self.nodes[name_of(outer)]
        if isinstance(node, MapNode):
            return (await self.elements(outer, node))[number]
        return await self.came_of(outer, number - 1) if number else await self.arrived(outer)

    async def elements(self, path: str, node: MapNode) -> Sequence[object]:
        """What a map goes through. Raises `Unfit`."""
        if path not in self._lists:
            found = await to_thread(evaluate.elements, node, await self.scope(path))
            if len(found) > ITEMS_MAX:
                raise Unfit(f"{len(found)} elements, and {ITEMS_MAX} are allowed")
            self._lists[path] = found
        return self._lists[path]

    async def _asked(self) -> str:
        """What was said to the run."""
        run = self.run
        said: dict[str, str] = {}
        for recorded in await self._ledger.events(run.since):
            data = recorded.event.data
            if isinstance(data, MessagePosted) and data.message_id in run.message_ids:
                said.setdefault(data.message_id, text_of(data))
        return "\n\n".join([said[name] for name in run.message_ids if name in said])

    # --- what they have given ---------------------------------------------------------------------------------------

    async def _gave(self, path: str) -> object:
        if path not in self._given:
            self._given[path] = await self._value(await self.end_of(path))
        return self._given[path]

    async def _value(self, finished: NodeFinished) -> object:
        if finished.port == ERR:
            return {"error": finished.error}
        text = finished.output
        if blob := finished.blob:
            data = await persist(lambda: self._bytes(blob))
            if data is None:
                raise Unfit(f"what node {finished.path} gave is lost")
            text = data.decode()
        try:
            return json.loads(text) if finished.json else text
        except (ValueError, RecursionError):
            raise Unfit(f"what node {finished.path} gave cannot be read as JSON") from None

    async def _bytes(self, blob: Blob) -> bytes | None:
        try:
            return await self._blobs.get(blob)
        except BlobLost:
            return None

    async def end_of(self, path: str) -> NodeFinished:
        data = (await self._ledger.at(self.run.visit(path).seq)).event.data
        assert isinstance(data, NodeFinished)
        return data

    async def _error(self, path: str) -> str:
        return f"node {path}: {(await self.end_of(path)).error}"
