"""What may be given as a policy, and that whatever is not offered is refused by its name."""

import pytest

from turnstream.session.errors import Rejected
from turnstream.session.events import PolicyData
from turnstream.session.policy import AVAILABLE, PLANNED, PLANNED_FIELDS, Policy, parse_policy


def refusal(given: dict[str, object], where: str = "policy") -> tuple[str, str | int]:
    with pytest.raises(Rejected) as caught:
        parse_policy(given, where)
    return caught.value.code, caught.value.details["field"]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in AVAILABLE.items() for value in values])
def test_what_is_offered_is_taken(name: str, value: str) -> None:
    assert getattr(parse_policy({name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in PLANNED.items() for value in values])
def test_a_known_value_that_is_not_offered_is_not_available(name: str, value: str) -> None:
    assert refusal({name: value}) == ("not_available", f"policy.{name}")
    assert refusal({name: value}, "") == ("not_available", name)


@pytest.mark.parametrize("name", sorted(PLANNED_FIELDS))
def test_a_known_field_that_is_not_offered_is_not_available(name: str) -> None:
    assert refusal({name: "resume"}) == ("not_available", f"policy.{name}")


@pytest.mark.parametrize("value", ["drop", "", 1, True, ["reject"], {"a": 1}])
def test_a_value_that_nobody_knows_is_invalid(value: object) -> None:
    assert refusal({"on_busy": value}) == ("invalid", "policy.on_busy")


def test_a_field_that_nobody_knows_is_invalid() -> None:
    assert refusal({"on_bussy": "queue"}) == ("invalid", "policy.on_bussy")


def test_what_is_absent_takes_its_default() -> None:
    assert parse_policy({}) == PolicyData() == parse_policy({"on_busy": None})
    assert Policy().on_busy == "reject"
    assert Policy().override(PolicyData(on_busy="queue")).override(PolicyData()).on_busy == "queue"
