"""Agents: saved, listed, looked at, deleted.

A saved version never changes. Those that the deployment defines in files and modules are shown here too, and are
changed there.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from turnstream import ids
from turnstream.agents import AgentsError
from turnstream.ids import agent_id
from turnstream.roster import Edition
from turnstream.roster.judge import judge
from turnstream.wire.agents import Deleted, Found, Pin, Saved, VersionConflict
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller
from turnstream_api.checks import WHOLE, Limit
from turnstream_api.errors import Problem, Wrong
from turnstream_api.operation import Request

DEFINITION_MAX: Final = 256 * 1024
"""Bytes of a definition as JSON."""
SAVED_MAX: Final = 1000
"""Agents that one account may save, each in as many versions as it likes."""
VERSIONS_SHOWN: Final = 200
FRESH: Final = 1.0
"""Seconds that a list waits at most until it shows everything that was saved."""

Name = Annotated[str, Meta(max_length=64, description="Lower-case letters, digits and `-`, at most 32.")]
Version = Annotated[str, Meta(max_length=64, description="Letters, digits, `_` and `-`, at most 32.")]
SourceKind = Literal["file", "module", "built-in", "saved"]


class SaveAgent(Request, frozen=True, kw_only=True):
    """`definition`: what an agent's file says, as JSON, 256 KiB at most."""

    name: Name
    version: Version
    definition: dict[str, object]


class SavedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is saved. `created`: by this request. `pins`: the very versions of the agents that its graph
    names, by node. `saved_at`: milliseconds since the epoch, by the broker's clock."""

    name: str
    version: str
    digest: str
    created: bool
    saved_at: int
    by: str
    pins: dict[str, Pin]


async def save_agent(api: Api, caller: Caller, request: SaveAgent) -> Answer:
    """Saves a version of an agent, which is the current one from now on. The same content under the same version again
    changes nothing (200); other content is refused, for a version never changes."""
    name, version = request.name, request.version
    if not ids.is_name(name):
        raise Problem("invalid", "name: lower-case letters, digits and `-`, at most 32", field="name")
    if not ids.is_version(version):
        raise Problem("invalid", "version: letters, digits, `_` and `-`, at most 32", field="version")
    if not api.roster.may_save(name):
        raise _defined(api, name, "change it there, or save yours under another name")
    checks.value(request.definition, "definition", DEFINITION_MAX)
    await _find_room(api, caller.account, name)
    try:
        agent, pins = await judge(api.roster, caller.account, name, version, request.definition)
    except AgentsError as error:
        raise _faulty(name, error) from None
    saved = Saved(definition=request.definition, digest=agent.digest, pins=pins, saved_at=api.now(), by=caller.actor)
    try:
        found, is_new = await api.roster.save(caller.account, name, version, saved)
    except VersionConflict as conflict:
        message = f"{conflict}: its digest is {conflict.found.saved.digest}, and this one's {saved.digest}"
        raise Problem("version_conflict", message, field="version") from None
    body = SavedAgent(
        name=name,
        version=version,
        digest=found.saved.digest,
        created=is_new,
        saved_at=found.saved.saved_at,
        by=found.saved.by,
        pins=found.saved.pins,
    )
    return Answer(body=body, status=201 if is_new else 200)


async def _find_room(api: Api, account: str, name: str) -> None:
    """An account may not fill what every process keeps in memory."""
    names = api.roster.saved(account)
    if len(names) >= SAVED_MAX and name not in names:
        message = f"{len(names)} agents are saved already, {SAVED_MAX} are allowed: delete one first"
        raise Problem("too_large", message, limit=SAVED_MAX)


class ListAgents(Request, frozen=True, kw_only=True):
    limit: Limit = 50
    cursor: (
        Annotated[str, Meta(pattern=rf"^{ids.NAME.pattern}{WHOLE}", description="`next` of the page before.")] | None
    ) = None


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """An agent in its current version. `source`: where it comes from, `where`: in which file or module. `saved_at` and
    `by` are there if it is saved."""

    name: str
    source: SourceKind
    where: str
    version: str
    digest: str
    model: str
    description: str
    saved_at: int | None = None
    by: str | None = None


class AgentPage(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[AgentView, ...]
    next: str | None


async def list_agents(api: Api, caller: Caller, request: ListAgents) -> Answer:
    """Every agent that can be named, by name: those of files and modules, the built-in one, and those that the account
    has saved. `next` continues the list."""
    await api.roster.catch_up(FRESH)
    names = [name for name in api.roster.listed(caller.account) if request.cursor is None or name > request.cursor]
    page, more = names[: request.limit], len(names) > request.limit
    offered = api.agents(caller.account)
    editions = [await offered.find(name) for name in page]
    items = tuple([_view(edition) for edition in editions if edition])
    return Answer(body=AgentPage(items=items, next=page[-1] if more else None))


class GetAgent(Request, frozen=True, kw_only=True):
    name: str


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    digest: str
    saved_at: int | None
    by: str | None


class AgentDetail(AgentView, frozen=True, kw_only=True):
    """`definition`: what was said. `versions`: the latest 200, the current one first."""

    definition: dict[str, object]
    pins: dict[str, Pin]
    versions: tuple[VersionView, ...]


async def get_agent(api: Api, caller: Caller, request: GetAgent) -> Answer:
    """An agent in its current version, and the list of its versions."""
    name = request.name
    edition = await api.roster.current(caller.account, name) if ids.is_name(name) else None
    if edition is None:
        raise no_agent(name)
    if edition.saved is None:
        versions: Iterable[VersionView] = [
            VersionView(version=edition.spec.version, digest=edition.spec.digest, saved_at=None, by=None)
        ]
    else:
        found = await api.roster.versions(caller.account, name)
        versions = [_version(one) for one in reversed(found[-VERSIONS_SHOWN:])]
    return Answer(body=AgentDetail(**_whole(edition), versions=tuple(versions)))


class GetAgentVersion(Request, frozen=True, kw_only=True):
    name: str
    version: str


class AgentVersion(AgentView, frozen=True, kw_only=True):
    """One version of an agent, current or not."""

    definition: dict[str, object]
    pins: dict[str, Pin]


async def get_agent_version(api: Api, caller: Caller, request: GetAgentVersion) -> Answer:
    """One version of an agent."""
    named = agent_id(request.name, request.version)
    edition = await api.roster.find(caller.account, named) if ids.is_name(request.name) else None
    if edition is None:
        raise no_agent(named)
    return Answer(body=AgentVersion(**_whole(edition)))


class DeleteAgent(Request, frozen=True, kw_only=True):
    name: str


async def delete_agent(api: Api, caller: Caller, request: DeleteAgent) -> Answer:
    """Deletes an agent, all of its versions: nobody can name it any more. Its runs stay, and those that were asked for
    before are carried out. What a version said is kept for them, so saved again it must be the same."""
    name = request.name
    if not ids.is_name(name):
        raise no_agent(name)
    if not api.roster.may_save(name):
        raise _defined(api, name, "remove it there")
    if not await api.roster.delete(caller.account, name, Deleted(deleted_at=api.now(), by=caller.actor)):
        if api.roster.own(name):
            raise Problem("agent_defined", f"agent {name} is built in, and none is saved in its place")
        raise no_agent(name)
    return Answer(body=None, status=204)


def no_agent(name: str) -> Problem:
    return Problem("not_found", f"no agent {name[:80]}")


def _defined(api: Api, name: str, what: str) -> Problem:
    own = api.roster.own(name)
    where = f"the {own.source.kind} {own.source.name}" if own and own.source else "this deployment"
    return Problem("agent_defined", f"agent {name} is defined in {where} of this deployment: {what}", field="name")


def _faulty(name: str, error: AgentsError) -> Problem:
    faults = tuple([Wrong(path=fault.path, message=fault.message) for fault in error.faults])
    first = ": ".join(filter(None, (faults[0].path, faults[0].message)))
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    detail = f"the definition of agent {name} does not do: {first}{more}"
    return Problem("invalid", detail, faults=faults, field="definition")


def _view(edition: Edition) -> AgentView:
    source, saved = edition.source, edition.saved
    return AgentView(
        name=edition.agent.name,
        source=source.kind if source else "saved",
        where=source.name if source else "",
        version=edition.spec.version,
        digest=edition.spec.digest,
        model=edition.agent.model,
        description=edition.agent.description,
        saved_at=saved.saved_at if saved else None,
        by=saved.by if saved else None,
    )


def _whole(edition: Edition) -> dict[str, Any]:
    said = edition.saved.definition if edition.saved else edition.agent.model_dump(mode="json", exclude_defaults=True)
    return {**msgspec.structs.asdict(_view(edition)), "definition": said, "pins": dict(edition.pins)}


def _version(found: Found) -> VersionView:
    saved = found.saved
    return VersionView(version=found.version, digest=saved.digest, saved_at=saved.saved_at, by=saved.by)
