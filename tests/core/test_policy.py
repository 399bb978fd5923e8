"""What may be given as a policy, how layers make one, and that whatever is not offered is refused by its name."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from turnstream.session.errors import Rejected
from turnstream.session.events import NO_POLICY, DeleteData, HistoryData, OnMessageData, PolicyData
from turnstream.session.policy import (
    AUTHOR_MAX,
    CHOICES,
    GROUPS,
    PRESETS,
    STARTERS_MAX,
    STRICT,
    Policy,
    merged,
    parse_policy,
    resolve,
)


def refusal(given: dict[str, object], where: str = "policy") -> tuple[str, str | int]:
    with pytest.raises(Rejected) as caught:
        parse_policy(given, where)
    return caught.value.code, caught.value.details["field"]


def nested(name: str, value: object) -> dict[str, object]:
    """The field as JSON gives it: `a.b` lies in `a`."""
    group, _, field = name.rpartition(".")
    return {group: {field: value}} if group else {field: value}


def values() -> Iterator[tuple[str, str]]:
    yield from ((name, value) for name, choices in CHOICES.items() for value in choices)


# -- what may be given ------------------------------------------------------------------------------------------------


def test_the_fields_are_those_of_a_policy() -> None:
    flat = {name.replace(".", "_") for name in CHOICES} - {"preset"}
    assert flat == {field.name for field in msgspec.structs.fields(Policy)}
    assert {name.partition(".")[0] for name in CHOICES} == set(PolicyData.__struct_fields__)


@pytest.mark.parametrize(("name", "value"), [*values()])
def test_what_is_offered_is_taken(name: str, value: str) -> None:
    layer = parse_policy(nested(name, value))
    assert msgspec.to_builtins(layer) == nested(name, value)
    if name != "preset":
        assert getattr(resolve(layer), name.replace(".", "_")) == value


@pytest.mark.parametrize("value", ["drop", "", 1, True, ["reject"], {"a": 1}])
@pytest.mark.parametrize("name", [name for name in CHOICES if name != "starters"])
def test_a_value_that_nobody_knows_is_invalid(name: str, value: object) -> None:
    assert refusal(nested(name, value)) == ("invalid", f"policy.{name}")


@pytest.mark.parametrize("name", ["on_bussy", "on_message.quesion", "history.turn", "delete.", "delete_mode"])
def test_a_field_that_nobody_knows_is_invalid(name: str) -> None:
    assert refusal(nested(name, "queue")) == ("invalid", f"policy.{name}")


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("value", ["queue", 1, ["all"]])
def test_a_group_is_an_object(name: str, value: object) -> None:
    assert refusal({name: value}) == ("invalid", f"policy.{name}")


def test_what_is_absent_or_null_is_not_given() -> None:
    nothing = [{}, {"on_busy": None}, {"history": None}, {"history": {}}, {"history": {"turns": None}}]
    assert [parse_policy(given) for given in nothing] == [NO_POLICY] * len(nothing)
    assert resolve() == resolve(NO_POLICY) == STRICT == PRESETS["strict"]


@pytest.mark.parametrize(
    "starters", [[], ["user:ann", 1], [""], ["x" * (AUTHOR_MAX + 1)], ["user:ann"] * (STARTERS_MAX + 1), "users", None]
)
def test_starters_are_any_people_or_a_list_of_authors(starters: object) -> None:
    if starters is None:
        assert parse_policy({"starters": ["user:ann", "client:k1"]}).starters == ("user:ann", "client:k1")
        assert resolve(parse_policy({"starters": ["user:ann"]})).starters == ("user:ann",)
        assert len(parse_policy({"starters": ["x" * AUTHOR_MAX] * STARTERS_MAX}).starters or ()) == STARTERS_MAX
        return
    assert refusal({"starters": starters}) == ("invalid", "policy.starters")


@pytest.mark.parametrize(
    ("starters", "may"),
    [
        ("any", {"user:ann", "client:k1", "agent:poet", "users"}),
        ("people", {"user:ann"}),
        (("client:k1", "agent:poet"), {"client:k1", "agent:poet"}),
    ],
)
def test_who_may_start_a_turn(starters: object, may: set[str]) -> None:
    policy = resolve(PolicyData(starters=starters))  # pyright: ignore[reportArgumentType]
    assert {name for name in ("user:ann", "client:k1", "agent:poet", "users") if policy.may_start(name)} == may


# -- presets ----------------------------------------------------------------------------------------------------------

TABLE = """
field                strict              memory     thread     workspace
on_busy              reject              parallel   steer      queue
message_on_busy      allow               allow      allow      allow
on_message.question  answer              parallel   answer     answer
on_message.approval  reject              parallel   decline    reject
on_message.parked    reject              interleave interleave interleave
authors              mixed               mixed      single     mixed
starters             any                 any        any        any
recovery             resume              durable    fail       resume
on_disconnect        detach              fail       detach     detach
history.turns        all                 completed  all        all
history.tools        bounded             none       full       bounded
history.window       fit                 all        all        all
history.compaction   off                 off        off        off
empty                fail                note       note       note
clock                running             running    running    running
titles               derived_then_agent  none       client     derived_then_agent
delete.mode          erase               detach     detach     detach
delete.active        reject              cancel     cancel     cancel
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()[1:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_each_preset_says(row: list[str]) -> None:
    found = [getattr(policy, row[0].replace(".", "_")) for policy in PRESETS.values()]
    assert found == row[1:]


def test_every_field_is_in_the_table() -> None:
    assert {row[0] for row in ROWS} == set(CHOICES) - {"preset"}
    assert list(PRESETS) == TABLE.split()[1:5]


# -- layers -----------------------------------------------------------------------------------------------------------


def test_a_later_layer_replaces_what_it_gives_and_nothing_else() -> None:
    server = PolicyData(on_busy="queue", clock="wall", history=HistoryData(turns="completed"))
    session = PolicyData(on_busy="steer", history=HistoryData(tools="full"))
    policy = resolve(server, session)
    assert (policy.on_busy, policy.clock) == ("steer", "wall")
    assert (policy.history_turns, policy.history_tools) == ("completed", "full")
    assert resolve(session, server).on_busy == "queue"


def test_a_preset_begins_anew() -> None:
    before = PolicyData(preset="memory", clock="wall")
    assert resolve(before, PolicyData(preset="thread", on_busy="queue")) == msgspec.structs.replace(
        PRESETS["thread"], on_busy="queue"
    )
    assert resolve(before, PolicyData(preset="strict")) == STRICT
    assert resolve(PolicyData(preset="memory"), PolicyData(on_busy="reject")).history_turns == "completed"


LAYERS = st.builds(
    PolicyData,
    preset=st.sampled_from([None, None, None, "strict", "memory", "thread"]),
    on_busy=st.sampled_from([None, "queue", "steer"]),
    on_message=st.none()
    | st.builds(
        OnMessageData,
        question=st.sampled_from([None, "reject", "queue"]),
        approval=st.sampled_from([None, "decline", "parallel"]),
    ),
    starters=st.sampled_from([None, "people", ("a",), ("b", "c")]),
    history=st.none() | st.builds(HistoryData, turns=st.sampled_from([None, "all", "completed"])),
    clock=st.sampled_from([None, "running", "wall"]),
    delete=st.none()
    | st.builds(
        DeleteData,
        mode=st.sampled_from([None, "erase"]),
        active=st.sampled_from([None, "reject", "cancel"]),
    ),
)


@for_all(st.lists(LAYERS, max_size=4))
def test_layers_that_are_merged_say_the_same(layers: list[PolicyData]) -> None:
    assert resolve(merged(*layers)) == resolve(*layers)


@for_all(st.lists(LAYERS, max_size=4), st.integers(0, 4))
def test_merging_some_first_changes_nothing(layers: list[PolicyData], split: int) -> None:
    assert resolve(merged(*layers[:split]), *layers[split:]) == resolve(*layers)


def test_nothing_merged_is_nothing() -> None:
    assert merged() == merged(NO_POLICY, NO_POLICY) == NO_POLICY
