"""What the views promise, on every database: rows are folds of the log, whatever happens to whoever writes them."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.logs import wander

from turnstream.session.events import Recorded
from turnstream.views import generations
from turnstream.views.database import Database


async def rows(db: Database, generation: int) -> dict[str, list[tuple[object, ...]]]:
    """Every row of a generation, the tables by their names without the number."""
    found: dict[str, list[tuple[object, ...]]] = {}
    async with db.engine.connect() as connection:
        for table in generations.tables(generation):
            statement = table.select().order_by(*table.primary_key)
            found[table.name.rpartition("_")[0]] = [tuple(row) for row in await connection.execute(statement)]
    return found


async def fresh(db: Database, events: list[Recorded]) -> dict[str, list[tuple[object, ...]]]:
    """The rows of a rebuild of these events, in one batch."""
    at = await generations.create(db, "log")
    await generations.Writer(db, at).apply(events, events[-1].seq if events else 0)
    return await rows(db, at.generation)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), data=st.data())
async def test_s52_rows_are_the_same_however_the_log_is_cut_into_batches(
    database: Database, seed: int, data: st.DataObject
) -> None:
    events = wander(random.Random(seed), 60)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(events) - 1), max_size=12)))
    await generations.prepare(database, "log")
    at = await generations.create(database, "log")
    writer = generations.Writer(database, at)
    for begin, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        if data.draw(st.booleans()):  # the projector died here: the next one knows only what was committed
            writer = generations.Writer(database, generations.Checkpoint(at.generation, writer.position, "log"))
        await writer.apply(events[begin:end], events[end - 1].seq)
    found = await rows(database, at.generation)
    assert found == await fresh(database, events)
    assert found["sessions"]
