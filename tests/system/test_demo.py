"""The demo, as a stranger without a terminal runs it: it keeps every promise, says how to do the same, and exits 0."""

import os
from pathlib import Path

import pytest
from tests.support.processes import Spawn

from turnstream_cli.place import read_addresses

pytestmark = pytest.mark.system


async def test_the_demo_keeps_every_promise(spawn: Spawn, tmp_path: Path) -> None:
    # The embedded default, whatever the environment says.
    demo = spawn("demo", nats_url="nats://127.0.0.1:9", database_url="postgresql://127.0.0.1:9/none", lease=60)
    assert await demo.ended(timeout=120) == 0, demo.log

    assert "✗" not in demo.log
    assert demo.log.count("✓") == 20
    for shown in (
        "nats pub ts.inbox.default.tour-",
        "curl http://127.0.0.1:",
        "kill -9 ",
        "turnstream runs cancel tour-",
        "turnstream answer tour-",
    ):
        assert shown in demo.log
    (data,) = [line.split(maxsplit=1)[1] for line in demo.log.splitlines() if line.startswith("  data ")]
    assert not os.path.exists(data)  # noqa: ASYNC240


@pytest.mark.slow
async def test_a_demo_that_is_stopped_leaves_nothing_behind(spawn: Spawn, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    demo = spawn("demo", "--data-dir", str(folder))
    killed = (await demo.until_logged("$ kill -9", timeout=60)).rpartition(" ")[2]
    assert await demo.stop() == 130
    assert "the demo was interrupted" in demo.log
    assert read_addresses(folder) is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(killed), 0)
