"""Every setting of every service, typed, once. Nobody else looks at the environment.

A value comes from the first of: what the program was started with (`Settings(http_port=0)`), the environment
(`TURNSTREAM_HTTP_PORT`; `TURNSTREAM_MODELS__LOCAL__BASE_URL` for one inside another), the TOML file that
`TURNSTREAM_CONFIG` names or `turnstream.toml` in the working directory, the default below. Durations are seconds, sizes
are bytes. `load` says in one line what is wrong; `explain` says where each value came from.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as SourceError

PREFIX = "TURNSTREAM_"
CONFIG = "TURNSTREAM_CONFIG"
"""Names the TOML file."""
CLIENT = frozenset({CONFIG, "TURNSTREAM_URL", "TURNSTREAM_API_KEY"})
"""Variables with our prefix that are no setting of a service: where the file is, and what client commands read."""

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,32}$")]
Port = Annotated[int, Field(ge=0, le=65535)]
SyncInterval = Annotated[str, StringConstraints(pattern=r"^(always|[1-9][0-9]*(ms|s|m|h))$")]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]
Wire = Literal["responses", "chat", "anthropic", "demo"]
"""How a model is asked: OpenAI's Responses or chat completions, Anthropic's Messages, or in the runner itself."""

_PASSWORD = re.compile(r"(?<=://)([^/@]*):([^/@]*)@")


class SettingsError(Exception):
    """A setting is missing, unknown or has a value that does not fit; the message names it."""


class ModelSettings(BaseModel):
    """A logical model name: which provider answers, at which address, with which key.

    `api` is which of OpenAI's interfaces a model of provider `openai` is asked through. Absent: `responses`, or `chat`
    where there is a `base_url`, for chat completions are what other servers speak.
    The key is `api_key`, else what the environment variable `api_key_env` holds when the model is first called.
    `silence` is how long the provider may send nothing before the call is given up; a model that reasons without
    showing it, or is slow to begin, needs minutes. `context` is how many tokens the model takes, its answer included;
    absent: what is known of models of that name, else few (`turnstream.agents.context_of`). `images`: whether the model
    takes any; one that does not is told the names of those that were attached. Prices are of a million tokens, in any
    one currency; what the provider had cached costs `cached_price`, what it wrote into its cache `caching_price`, or as
    much as other input.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    provider: Literal["openai", "anthropic", "demo"]
    model: str = ""
    api: Literal["responses", "chat"] | None = None
    base_url: str | None = None
    api_key: SecretStr | None = None
    api_key_env: str | None = None
    silence: PositiveFloat = 300.0
    context: Annotated[int, Field(ge=256)] | None = None
    images: bool = True
    input_price: NonNegativeFloat | None = None
    cached_price: NonNegativeFloat | None = None
    caching_price: NonNegativeFloat | None = None
    output_price: NonNegativeFloat | None = None

    @property
    def wire(self) -> Wire:
        """How the model is asked."""
        if self.provider != "openai":
            return self.provider
        return self.api or ("chat" if self.base_url else "responses")

    @property
    def has_prices(self) -> bool:
        return self.input_price is not None and self.output_price is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.provider != "demo" and not self.model:
            raise ValueError(f"a model of provider {self.provider!r} needs `model`, the provider's name for it")
        if self.provider != "openai" and self.api:
            raise ValueError(f"`api` is of models of provider 'openai'; {self.provider!r} has one alone")
        prices = (self.input_price, self.cached_price, self.caching_price, self.output_price)
        if not self.has_prices and prices != (None,) * 4:
            raise ValueError("a model has both `input_price` and `output_price`, or no price at all")
        return self


class Settings(BaseSettings):
    """Every effective setting. Frozen: a service that wants others is started with others."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    data_dir: Path = Field(Path(".turnstream"), description="where the embedded server and SQLite keep their files")
    nats_url: str = Field("", description="NATS server; empty: the embedded one (only `dev` and `demo` have one)")
    nats_port: Port = Field(4222, description="port of the embedded server; 0: any free one")
    nats_user: str = Field("", description="user name at the NATS server")
    nats_password: SecretStr = Field(SecretStr(""), description="password at the NATS server")
    nats_creds: Path | None = Field(None, description="NATS credentials file (JWT and seed)")
    replicas: Annotated[int, Field(ge=1, le=5)] = Field(1, description="copies of every stream; 3 in production")
    sync_interval: SyncInterval | None = Field(
        None, description="how often the embedded server syncs to disk: `always` or a duration; none: its default, 2m"
    )
    database_url: str = Field("", description="SQLAlchemy URL of the views; empty: SQLite in the data directory")

    http_host: str = Field("127.0.0.1", description="address the API listens on")
    http_port: Port = Field(8080, description="port the API listens on; 0: any free one")
    health_host: str = Field("127.0.0.1", description="address of the runner's and projector's health page")
    health_port: Port | None = Field(None, description="port of that page; none: no page; 0: any free one")

    account: Name = Field("default", description="account of callers where no API key exists yet")
    default_model: str = Field("demo", description="model of the agent `default`")
    agents_dir: Path | None = Field(None, description="folder with agent definitions (TOML or JSON)")
    modules: Annotated[tuple[str, ...], NoDecode] = Field((), description="Python modules with agents and tools")
    models: dict[str, ModelSettings] = Field(
        default_factory=lambda: dict[str, ModelSettings](), description="logical model names"
    )
    policy: dict[str, object] = Field(
        default_factory=lambda: dict[str, object](), description="policy of agents and sessions that say nothing else"
    )
    inbox_on_busy: Literal["reject", "queue"] = Field(
        "queue", description="what a session that the inbox opens does with a message while busy, instead of `reject`"
    )

    mcp_commands: bool = Field(False, description="whether saved agents may have MCP servers that the runner starts")
    mcp_variables: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="variables of the runner's environment that saved agents may refer to"
    )

    queues: Annotated[tuple[Name, ...], NoDecode] = Field(("default",), description="queues that a runner serves")
    runner_slots: PositiveInt = Field(64, description="runs at once in one runner process, for each queue")
    lease: Annotated[float, Field(ge=1)] = Field(
        15.0, description="a run whose runner is silent this long is taken over"
    )
    drain_grace: NonNegativeFloat = Field(10.0, description="time that a runner gives its runs at shutdown")
    sweep_every: PositiveFloat = Field(30.0, description="how often the sweep looks for forgotten runs")
    sweep_after: NonNegativeFloat = Field(30.0, description="age of a run before the sweep looks at it")

    heartbeat: PositiveFloat = Field(15.0, description="longest silence on a stream of server-sent events")
    listener_buffer: Annotated[int, Field(ge=4096)] = Field(1 << 20, description="bytes one slow listener can hold")
    append_timeout: PositiveFloat = Field(5.0, description="longest wait for the broker to store an event")
    after_timeout: PositiveFloat = Field(2.0, description="longest wait of a read with `after` for the projector")
    message_max: PositiveInt = Field(65_536, description="largest message")
    event_max: Annotated[int, Field(ge=4096)] = Field(
        524_288, description="largest event; longer tool results and answers go to the object store"
    )
    attachment_max: PositiveInt = Field(8_388_608, description="largest attachment")
    attachment_expires: PositiveFloat = Field(
        86_400.0, description="time that an attachment is kept which no message names"
    )
    one_shot_expires: Annotated[float, Field(ge=60)] | None = Field(
        30 * 86_400.0, description="time that a run without a session is kept after its last event; none: for ever"
    )
    metadata_max: PositiveInt = Field(8_192, description="largest metadata of a session")
    tombstone: Annotated[int, Field(ge=300)] = Field(
        7 * 86_400, description="time that the id of an erased session is kept from late writers; then it is free"
    )

    log_level: LogLevel = Field("info", description="least severe entry that is written")
    log_format: LogFormat = Field("json", description="`json`, or `console` for people")

    @property
    def database(self) -> str:
        """The views' SQLAlchemy URL, with an async driver."""
        if not self.database_url:
            return f"sqlite+aiosqlite:///{self.data_dir.absolute() / 'views.db'}"
        for plain, driver in _DRIVERS.items():
            if self.database_url.startswith(plain + "://"):
                return driver + self.database_url.removeprefix(plain)
        return self.database_url

    @field_validator("queues", "modules", "mcp_variables", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Lists are written `a,b` in the environment."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("queues")
    @classmethod
    def _unique(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("must name at least one queue, and none twice")
        return value

    @field_validator("sync_interval", "agents_dir", "nats_creds", "health_port", "one_shot_expires", mode="before")
    @classmethod
    def _blank(cls, value: object) -> object:
        """An empty variable says "none": what compose files write for a value that is not set."""
        return None if value == "" else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = config_file(os.environ)
        return (init_settings, env_settings) + ((TomlConfigSettingsSource(settings_cls, file),) if file else ())


_DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "sqlite": "sqlite+aiosqlite",
}


class Explained(NamedTuple):
    """One effective setting, secrets masked. `origin` is `default`, `started with`, `$VARIABLE` or the file's path."""

    name: str
    value: object
    origin: str
    description: str


def load(**given: object) -> Settings:
    """The effective settings; None in `given` counts as not given. Raises `SettingsError`."""
    file = config_file(os.environ)
    if file and not file.is_file():
        raise SettingsError(f"{CONFIG} names {file}, which is not a file")
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        raise SettingsError("; ".join(_fault(fault, file) for fault in error.errors())) from None
    except SourceError as error:
        raise SettingsError(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from None
    except ValueError as error:  # a TOML file that is none
        raise SettingsError(f"{file}: {error}") from None


def config_file(environ: Mapping[str, str]) -> Path | None:
    """The TOML file that is read, if any."""
    named = environ.get(CONFIG)
    if named:
        return Path(named)
    return path if (path := Path("turnstream.toml")).is_file() else None


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that name no setting: misspelt, or somebody else's (Kubernetes' service links)."""
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in CLIENT and not _field(name))


def explain(settings: Settings, given: Mapping[str, object], environ: Mapping[str, str]) -> list[Explained]:
    """Every effective setting, one a row (a logical model is `models.<name>.<field>`), and where it came from."""
    file = config_file(environ)
    in_file = set[str]()
    if file:
        source = TomlConfigSettingsSource(Settings, file)
        in_file = {path for path, _ in _flatten("", cast("Mapping[str, object]", source()))}
    variables = {_field(name).lower(): name for name in environ if name.startswith(PREFIX) and _field(name)}

    def origin(path: str) -> str:
        top = path.split(".")[0]
        if given.get(top) is not None:
            return "started with"
        variable = variables.get(path.replace(".", "__").lower()) or variables.get(top)
        if variable:
            return f"${variable}"
        return str(file) if path in in_file or top in in_file else "default"

    rows: list[Explained] = []
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        for path, leaf in _flatten(name, value):
            rows.append(Explained(path, _masked(leaf), origin(path), field.description or ""))
    return rows


def _field(variable: str) -> str:
    """What a variable sets, `__` between levels; empty if it is no setting."""
    path = variable.removeprefix(PREFIX)
    top = path.split("__", 1)[0].lower()
    return path if top in Settings.model_fields and (top in ("models", "policy") or "__" not in path) else ""


def _flatten(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping) and value:
        for name, inner in cast("Mapping[str, object]", value).items():
            yield from _flatten(f"{path}.{name}" if path else name, inner)
    else:
        yield path, value


def _masked(value: object) -> object:
    match value:
        case SecretStr():
            return "********" if value.get_secret_value() else ""
        case str():
            return _PASSWORD.sub(r"\1:********@", value)
        case Path():
            return str(value)
        case _:
            return value


def _fault(fault: ErrorDetails, file: Path | None) -> str:
    name = ".".join(str(part) for part in fault["loc"]) or "settings"
    message = "no such setting" if fault["type"] == "extra_forbidden" else fault["msg"].removeprefix("Value error, ")
    if file and fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:  # what the environment adds is left out
        name = f"{file}: {name}"
    return f"{name}: {message}"
