"""What is deployed fits the product: settings that exist, commands that exist, no address or secret baked in."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnstream.agents import lookup
from turnstream.settings import Settings
from turnstream_cli.stack import SERVICES
from turnstream_runner.models.registry import WIRES
from turnstream_runner.runner import HANDOVER

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def test_every_variable_names_a_setting() -> None:
    named = set(re.findall(r"TURNSTREAM_(\w+)=", DOCKERFILE))
    for service in SERVICES:
        named |= {
            name.removeprefix("TURNSTREAM_")
            for name in COMPOSE["services"][service]["environment"]
            if name.startswith("TURNSTREAM_")
        }
    assert named
    assert {name.lower() for name in named} <= set(Settings.model_fields)


def test_what_compose_sets_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COMPOSE["services"]["api"]["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    assert Settings().database == "postgresql+asyncpg://turnstream:local-views@postgres/turnstream"


def test_every_provider_in_the_image_can_be_given_a_key() -> None:
    inside = set(re.findall(r"--extra (\w+)", DOCKERFILE)) & WIRES.keys()
    keys = {lookup(f"{provider}:m", {}).api_key_env for provider in inside}
    assert inside == WIRES.keys()
    assert keys <= COMPOSE["services"]["runner"]["environment"].keys()


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_a_target_that_starts_it(service: str) -> None:
    build = COMPOSE["services"][service]["build"]
    assert build["target"] == service
    target = DOCKERFILE.split(f"FROM base AS {service}\n")[1].split("\nFROM ")[0]
    assert f'CMD ["{service}"]' in target
    assert "HEALTHCHECK" in target


def test_a_runner_is_left_the_time_to_hand_its_runs_over() -> None:
    grace = COMPOSE["services"]["runner"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > Settings.model_fields["drain_grace"].default + HANDOVER


def test_the_build_is_given_what_it_copies_and_nothing_else() -> None:
    given = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    copied = {path for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M) for path in line.split()}
    assert "*" in IGNORED
    assert given == copied


def test_services_do_not_run_as_root() -> None:
    base = DOCKERFILE.split("AS base\n")[1].split("\nFROM ")[0]
    assert "USER 10001" in base


def test_every_secret_comes_from_the_environment() -> None:
    for name, service in COMPOSE["services"].items():
        for variable, value in service.get("environment", {}).items():
            if "PASSWORD" in variable or "KEY" in variable:
                assert value.startswith("${"), f"{name}: {variable}"


def test_the_lock_file_has_hashes_and_no_addresses() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    pinned = re.findall(r"^([\w.-]+)==\S+.* \\\n    --hash=sha256:", lock, re.M)
    assert len(pinned) == len(re.findall(r"^[\w.-]+", lock, re.M))
    for name in ("nats-py", "pytest", "asyncpg", "pydantic-ai-slim"):
        assert name in pinned
