"""Settings: where values come from, what is refused, what is shown."""

import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from turnstream import settings as settings_module
from turnstream.settings import Settings, SettingsError, explain, load, unknown
from turnstream_cli.main import main


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but the test's own."""
    for name in os.environ:
        if name.startswith(settings_module.PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_given_beats_environment_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("turnstream.toml").write_text('http_port = 1\nlease = 2\nreplicas = 3\n[models.fast]\nprovider = "demo"\n')
    monkeypatch.setenv("TURNSTREAM_HTTP_PORT", "4")
    monkeypatch.setenv("TURNSTREAM_LEASE", "5")

    settings = load(http_port=6)

    assert (settings.http_port, settings.lease, settings.replicas, settings.heartbeat) == (6, 5, 3, 15)
    assert settings.models["fast"].provider == "demo"


def test_the_file_that_the_environment_names_is_read_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("turnstream.toml").write_text("http_port = 1\n")
    Path("other.toml").write_text('queues = ["a", "b"]\n')
    monkeypatch.setenv("TURNSTREAM_CONFIG", "other.toml")

    settings = load()

    assert (settings.http_port, settings.queues) == (8080, ("a", "b"))


def test_nested_settings_and_lists_come_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTREAM_MODELS__LOCAL__PROVIDER", "openai")
    monkeypatch.setenv("TURNSTREAM_MODELS__LOCAL__MODEL", "small")
    monkeypatch.setenv("TURNSTREAM_MODELS__LOCAL__API_KEY", "sk-secret")
    monkeypatch.setenv("TURNSTREAM_QUEUES", "fast, slow")
    monkeypatch.setenv("TURNSTREAM_SYNC_INTERVAL", "")

    settings = load()

    assert settings.queues == ("fast", "slow")
    assert settings.sync_interval is None
    assert settings.models["local"].api_key == SecretStr("sk-secret")


def test_the_policy_comes_from_the_file_and_field_by_field_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("turnstream.toml").write_text(
        '[policy]\npreset = "thread"\nstarters = ["user:ann"]\n[policy.delete]\nmode = "erase"\n'
    )
    monkeypatch.setenv("TURNSTREAM_POLICY__ON_BUSY", "queue")
    monkeypatch.setenv("TURNSTREAM_POLICY__DELETE__ACTIVE", "cancel")

    settings = load()

    expected = {"mode": "erase", "active": "cancel"}
    assert settings.policy == {"preset": "thread", "starters": ["user:ann"], "on_busy": "queue", "delete": expected}
    rows = {row.name: (row.value, row.origin) for row in explain(settings, {}, os.environ)}
    assert rows["policy.preset"] == ("thread", "turnstream.toml")
    assert rows["policy.on_busy"] == ("queue", "$TURNSTREAM_POLICY__ON_BUSY")
    assert rows["policy.delete.active"] == ("cancel", "$TURNSTREAM_POLICY__DELETE__ACTIVE")
    assert unknown(os.environ) == []


def test_config_refuses_a_policy_that_no_service_starts_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TURNSTREAM_POLICY__DELETE__MODE", "forget")
    assert main(["config"]) == 2
    assert capsys.readouterr().err == "turnstream: policy.delete.mode: must be one of detach, erase\n"
    monkeypatch.setenv("TURNSTREAM_POLICY__DELETE__MODE", "detach")
    assert main(["config"]) == 0
    assert "policy.delete.mode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"http_port": "many"}, "http_port"),
        ({"http_prot": 8080}, "http_prot: no such setting"),
        ({"queues": "a,a"}, "queues: must name at least one queue, and none twice"),
        ({"queues": "No Name"}, "queues.0"),
        ({"sync_interval": "sometimes"}, "sync_interval"),
        ({"on_busy": "steer"}, "on_busy"),
        ({"models": {"m": {"provider": "openai"}}}, "needs `model`"),
        ({"lease": 0}, "lease"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint.replace("(", r"\(")) as refused:
        load(**given)
    assert "\n" not in str(refused.value)


def test_an_unknown_name_in_the_file_is_refused() -> None:
    Path("turnstream.toml").write_text("htpp_port = 1\n")
    with pytest.raises(SettingsError, match=r"^turnstream\.toml: htpp_port: no such setting$"):
        load()


def test_a_broken_file_is_named() -> None:
    Path("turnstream.toml").write_text("http_port =\n")
    with pytest.raises(SettingsError, match=r"turnstream\.toml"):
        load()


def test_a_named_file_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTREAM_CONFIG", "nowhere.toml")
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load()


def test_a_broken_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTREAM_MODELS", "{")
    with pytest.raises(SettingsError, match="models"):
        load()


@pytest.mark.parametrize(
    ("url", "effective"),
    [
        ("postgresql://u:p@host/db", "postgresql+asyncpg://u:p@host/db"),
        ("postgres://host/db", "postgresql+asyncpg://host/db"),
        ("sqlite:///x.db", "sqlite+aiosqlite:///x.db"),
        ("postgresql+asyncpg://host/db", "postgresql+asyncpg://host/db"),
    ],
)
def test_the_database_url_gets_an_async_driver(url: str, effective: str) -> None:
    assert Settings(database_url=url).database == effective


def test_without_a_database_url_the_views_lie_in_the_data_directory(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path).database == f"sqlite+aiosqlite:///{tmp_path}/views.db"


def test_explain_shows_every_setting_its_origin_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("turnstream.toml").write_text(
        'replicas = 3\n[models.m]\nprovider = "openai"\nmodel = "x"\napi_key = "sk-secret"\n'
    )
    monkeypatch.setenv("TURNSTREAM_DATABASE_URL", "postgresql://u:hunter2@host/db")
    monkeypatch.setenv("TURNSTREAM_MODELS__M__BASE_URL", "http://local")
    given = {"http_port": 1, "lease": None}
    rows = {row.name: row for row in explain(load(**given), given, os.environ)}

    assert {name.split(".")[0] for name in rows} == set(Settings.model_fields)
    assert all(row.description for row in rows.values())
    assert rows["http_port"].origin == "started with"
    assert rows["database_url"].origin == "$TURNSTREAM_DATABASE_URL"
    assert rows["replicas"].origin == "turnstream.toml"
    assert rows["models.m.model"].origin == "turnstream.toml"
    assert rows["models.m.base_url"].origin == "$TURNSTREAM_MODELS__M__BASE_URL"
    assert rows["lease"].origin == "default"
    assert rows["models.m.api_key"].value == "********"
    shown = repr(rows)
    assert "sk-secret" not in shown
    assert "hunter2" not in shown


def test_variables_that_name_no_setting_are_found() -> None:
    environ = {
        "TURNSTREAM_HTTP_PORT": "1",
        "TURNSTREAM_MODELS__A__MODEL": "x",
        "TURNSTREAM_URL": "http://x",
        "TURNSTREAM_API_PORT": "tcp://10.0.0.1:80",
        "TURNSTREAM_LEESE": "1",
        "HOME": "/",
    }
    assert unknown(environ) == ["TURNSTREAM_API_PORT", "TURNSTREAM_LEESE"]


def test_the_readme_lists_every_setting() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.split("<!-- settings -->")[1].split("<!-- /settings -->")[0].strip()
    assert shown == _table(), "put this between the markers:\n" + _table()


def _table() -> str:
    rows = ["| variable | default | what |", "|---|---|---|"]
    defaults = explain(load(), {}, {})
    for row in defaults:
        value = "" if row.value in (None, "", {}, ()) else row.value
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        shown = f"`{text}`" if text else ""
        rows.append(f"| `TURNSTREAM_{row.name.upper()}` | {shown} | {row.description} |")
    return "\n".join(rows)
