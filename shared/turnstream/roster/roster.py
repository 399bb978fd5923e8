"""Who is meant by a name, and what a version says.

To resolve a name costs nothing where it is the deployment's own, or a version that was read before. Else it costs one
message of the bucket: `Offered`, which the core looks names up in, raises `Unread` then, and whoever asked reads it and
asks again.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from turnstream import ids, subjects
from turnstream.agents import BUILT_IN, Agent, Agents
from turnstream.roster.edition import Edition, Editions, Unusable, edition_of, named_by, pin_of
from turnstream.roster.names import Name, Names
from turnstream.session.events import Spec
from turnstream.settings import Settings
from turnstream.specs import schemas_of, server_policy, tools_of
from turnstream.telemetry import get_logger
from turnstream.wire.agents import Deleted, Found, Pin, Saved, SavedAgents

log = get_logger()

NO_NAME: Final = Name()


class Unread(Exception):
    """Who an agent is has to be asked of the broker: `read`, and then ask again."""

    def __init__(self, offered: "Offered", name: str) -> None:
        super().__init__(f"agent {name} of account {offered.account} was not read yet")
        self._offered = offered
        self._name = name

    async def read(self) -> None:
        """Raises `BrokerFault`."""
        await self._offered.read(self._name)


class Roster:
    """The agents of every account. `shelf`: where saved ones lie; None: there are none. `names`: which of their
    versions are current, if somebody follows that here; else the broker is asked each time."""

    def __init__(
        self,
        local: Agents,
        specs: Mapping[str, Spec],
        settings: Settings,
        shelf: SavedAgents | None = None,
        names: Names | None = None,
    ) -> None:
        self.local = local
        self.settings = settings
        self.names = names
        self._shelf = shelf
        self._server = server_policy(settings)
        self._schemas = schemas_of(local.tools)
        self._own = {
            agent.name: Edition(
                agent=agent,
                spec=specs[agent.name],
                tools=tools_of(agent, self._schemas),
                pins=_pins(agent, specs),
                source=local.source(agent.name),
            )
            for agent in local
        }
        self._editions = Editions()

    # --- by name ----------------------------------------------------------------------------------------------------

    def of(self, account: str) -> "Offered":
        """The agents of an account, as one request sees them."""
        return Offered(self, account)

    async def find(self, account: str, name: str) -> Edition | None:
        """Who is meant by this name now. Raises `BrokerFault`."""
        return await self.of(account).find(name)

    def own(self, name: str) -> Edition | None:
        """What the deployment defines itself under a name."""
        return self._own.get(name)

    @property
    def models(self) -> tuple[str, ...]:
        """Of the deployment's own agents."""
        return tuple({edition.agent.model for edition in self._own.values()})

    def may_save(self, name: str) -> bool:
        """Whether the name is free for saved agents."""
        own = self._own.get(name)
        return own is None or own.source == BUILT_IN

    def listed(self, account: str) -> list[str]:
        """The names of everybody there is, as far as is known here."""
        return sorted({*self._own, *self.saved(account)})

    def saved(self, account: str) -> list[str]:
        """The names of the agents that an account has saved, as far as is known here."""
        return self.names.of(account) if self.names else []

    async def catch_up(self, timeout: float) -> None:
        """Waits until everything is known that was saved up to now, so many seconds at most. Raises `BrokerFault`."""
        if self.names and self._shelf:
            await self.names.reach(await self._shelf.last_seq(), timeout)

    async def current(self, account: str, name: str) -> Edition | None:
        """Who is meant by this name, by the broker's word. Raises `BrokerFault`."""
        return await self.look_up(account, name) if self.may_save(name) else self._own[name]

    def recall(self, offered: "Offered", text: str) -> Edition | None:
        """Who is meant, without looking. Raises `Unread`."""
        parsed = ids.parse_agent(text)
        if parsed is None:
            return None
        name, version = parsed
        own = self._own.get(name)
        if self._shelf is None or not self.may_save(name):
            return own if own and version in (None, own.spec.version) else None
        known = self.names.get(offered.account, name) if self.names else None
        if version is None and own and self.names and not (known and known.version):
            return own
        found = self._editions.get(offered.account, name, version or known.version) if known else None
        if found is None or found.seq < (known or NO_NAME).deleted:
            raise Unread(offered, text)
        return found

    async def look_up(self, account: str, text: str) -> Edition | None:
        """Who is meant, by the broker's word. Raises `BrokerFault`."""
        parsed = ids.parse_agent(text)
        if parsed is None or self._shelf is None:
            return None
        name, version = parsed
        if version is None:
            found = await self._shelf.current(account, name)
        else:
            found = await self._shelf.get(account, name, version)
            if found and found.seq < await self._deleted(account, name):
                found = None
        if found:
            self._note(found)
            return self._keep(found)
        own = self._own.get(name)
        return own if own and version in (None, own.spec.version) else None

    async def _deleted(self, account: str, name: str) -> int:
        assert self._shelf
        known = self.names.get(account, name) if self.names else None
        return known.deleted if known else await self._shelf.mark(account, name)

    # --- by what a run has pinned -----------------------------------------------------------------------------------

    async def pinned(self, account: str, pin: Pin) -> Edition | None:
        """The very version that was pinned, deleted or not. Raises `BrokerFault`."""
        own = self._own.get(pin.agent)
        if own and own.spec.digest == pin.digest:
            return own
        found = self._editions.get(account, pin.agent, pin.version)
        if found is None and self._shelf and ids.is_name(pin.agent) and ids.is_version(pin.version):
            stored = await self._shelf.get(account, pin.agent, pin.version)
            found = self._keep(stored) if stored else None
        return found if found and found.spec.digest == pin.digest else None

    # --- what is saved ----------------------------------------------------------------------------------------------

    async def save(self, account: str, name: str, version: str, saved: Saved) -> tuple[Found, bool]:
        """False: it is there already. Raises `VersionConflict`, `BrokerFault`."""
        assert self._shelf
        found, is_new = await self._shelf.put(account, name, version, saved)
        self._note(found)
        return found, is_new

    async def delete(self, account: str, name: str, deleted: Deleted) -> bool:
        """False: nothing is saved, or it is deleted already. Raises `BrokerFault`."""
        assert self._shelf
        gone = await self._shelf.delete(account, name, deleted)
        mark = await self._shelf.mark(account, name)
        if mark and self.names:
            self.names.take(account, name, subjects.DELETED, mark)
        return gone or mark > 0

    async def versions(self, account: str, name: str) -> list[Found]:
        """Raises `BrokerFault`."""
        return await self._shelf.versions(account, name) if self._shelf else []

    def _note(self, found: Found) -> None:
        if self.names:
            self.names.take(found.account, found.name, found.version, found.seq)

    def _keep(self, found: Found) -> Edition | None:
        """None: it is there, and of no use."""
        try:
            edition = edition_of(found, self._server, self._schemas)
        except Unusable as error:
            log.error("a saved agent is of no use", account=found.account, error=error)
            return None
        self._editions.keep(found, edition)
        return edition


def _pins(agent: Agent, specs: Mapping[str, Spec]) -> dict[str, Pin]:
    """The deployment's own agents name each other alone."""
    named = {node: specs.get(ref.partition("@")[0]) for node, ref in named_by(agent)}
    return {node: pin_of(spec) for node, spec in named.items() if spec}


class Offered(Mapping[str, Spec]):
    """The agents of an account by all that they can be named as, as one request sees them: what it has once found it
    finds again, whatever is saved meanwhile. To look one up may raise `Unread`."""

    def __init__(self, roster: Roster, account: str) -> None:
        self.account = account
        self._roster = roster
        self._found: dict[str, Edition | None] = {}

    async def find(self, name: str) -> Edition | None:
        """Raises `BrokerFault`."""
        try:
            return self.edition(name)
        except Unread:
            return await self.read(name)

    async def read(self, name: str) -> Edition | None:
        """Raises `BrokerFault`."""
        self._found[name] = await self._roster.look_up(self.account, name)
        return self._found[name]

    def __getitem__(self, name: str) -> Spec:
        if edition := self.edition(name):
            return edition.spec
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._roster.listed(self.account))

    def __len__(self) -> int:
        return len(self._roster.listed(self.account))

    @property
    def tools(self) -> "Tools":
        """What a person may call of each, with the schemas of the arguments."""
        return Tools(self)

    def edition(self, name: str) -> Edition | None:
        """Raises `Unread`."""
        if name not in self._found:
            self._found[name] = self._roster.recall(self, name)
        return self._found[name]


class Tools(Mapping[str, Mapping[str, str]]):
    """What a person may call of the tools of each agent."""

    def __init__(self, offered: Offered) -> None:
        self._offered = offered

    def __getitem__(self, name: str) -> Mapping[str, str]:
        if edition := self._offered.edition(name):
            return edition.tools
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._offered)

    def __len__(self) -> int:
        return len(self._offered)
