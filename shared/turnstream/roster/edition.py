"""One version of an agent, as whoever starts or carries out a run needs it; and those of saved agents that were read,
kept in memory.

A version never changes, so what is kept stays true; it goes when there is no room.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from turnstream.agents import Agent, AgentsError, Source, define
from turnstream.ids import agent_id
from turnstream.session.events import PolicyData, Spec
from turnstream.specs import spec_of, tools_of
from turnstream.wire.agents import Found, Pin, Saved

KEEP_BYTES: Final = 32 << 20
"""Bytes of saved definitions that a process keeps."""


class Unusable(Exception):
    """What was saved cannot be used by this release, or is not what its digest says."""


class Edition(msgspec.Struct, frozen=True, kw_only=True):
    """`spec`: what a run of it carries out; `tools`: what a person may call, with the schemas of the arguments; `pins`:
    the very versions of the agents that its graph names, by node. `saved` is there if it was saved, and `seq` is where
    it lies then; else `source` says where it is defined."""

    agent: Agent
    spec: Spec
    tools: Mapping[str, str]
    pins: Mapping[str, Pin] = {}
    source: Source | None = None
    saved: Saved | None = None
    seq: int = 0


def edition_of(found: Found, server: PolicyData, schemas: Mapping[str, str]) -> Edition:
    """Of what was saved. Raises `Unusable`."""
    name, saved = agent_id(found.name, found.version), found.saved
    try:
        agent = define(f"agent {name}", {"name": found.name, **saved.definition})
        spec = spec_of(agent, server, found.version)
    except AgentsError as error:
        raise Unusable(f"agent {name} cannot be used by this release: {error}") from None
    if (agent.name, agent.digest) != (found.name, saved.digest):
        raise Unusable(f"agent {name} is not what it was saved as: its digest is another")
    tools = tools_of(agent, schemas)
    return Edition(agent=agent, spec=spec, tools=tools, pins=saved.pins, saved=saved, seq=found.seq)


def pin_of(spec: Spec) -> Pin:
    """The version of the agent that a run carries out."""
    return Pin(agent=spec.agent, version=spec.version, digest=spec.digest)


def named_by(agent: Agent) -> Iterator[tuple[str, str]]:
    """The nodes of its graph, and of those in it, that name an agent, and which: ids are unique in the whole."""
    for place, ref in agent.graph.agents() if agent.graph else ():
        yield str(place[-2]), ref


class Editions:
    """Saved versions that were read, up to a number of bytes; what was used longest ago goes first."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._room = keep_bytes
        self._kept: OrderedDict[tuple[str, str, str], tuple[Edition, int]] = OrderedDict()

    def get(self, account: str, name: str, version: str) -> Edition | None:
        kept = self._kept.get((account, name, version))
        if kept is None:
            return None
        self._kept.move_to_end((account, name, version))
        return kept[0]

    def keep(self, found: Found, edition: Edition) -> None:
        place = (found.account, found.name, found.version)
        if before := self._kept.pop(place, None):
            self._room += before[1]
        self._kept[place] = edition, found.size
        self._room -= found.size
        while self._room < 0 and len(self._kept) > 1:
            _, (_, size) = self._kept.popitem(last=False)
            self._room += size
