"""A map that remembers its newest entries."""

from hypothesis import given as for_all
from hypothesis import strategies as st

from turnstream.session.recent import BLOCK, Recent


@for_all(st.integers(1, 300), st.integers(0, 600))
def test_the_newest_are_remembered_and_the_rest_is_forgotten(keep: int, count: int) -> None:
    recent: Recent[int] = Recent(keep)
    for n in range(count):
        recent = recent.add(str(n), n)
    remembered = [n for n in range(count) if recent.get(str(n)) is not None]
    assert remembered == list(range(count - len(remembered), count))
    assert min(count, keep) <= len(remembered) < keep + 2 * BLOCK
    assert all(recent.get(str(n)) == n for n in remembered)


@for_all(st.integers(1, 300), st.integers(0, 400), st.integers(0, 400))
def test_another_value_makes_nothing_newer(keep: int, count: int, changed: int) -> None:
    recent: Recent[int] = Recent(keep)
    for n in range(count):
        recent = recent.add(str(n), n)
    after = recent.put(str(changed), -1)
    for n in range(count + 1):
        known = recent.get(str(n))
        assert after.get(str(n)) == (-1 if n == changed and known is not None else known)
        assert recent.get(str(n)) == known


def test_adding_changes_nothing_that_somebody_holds() -> None:
    first: Recent[int] = Recent(10).add("a", 1)
    one, other = first.add("b", 2), first.add("b", 3)
    assert (first.get("b"), one.get("b"), other.get("b")) == (None, 2, 3)
