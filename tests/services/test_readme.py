"""The README speaks of what is there."""

import re
from pathlib import Path

from turnstream_cli.main import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_test_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", README))
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named
    assert not named - defined


def test_every_command_and_target_that_the_readme_names_exists() -> None:
    commands = set(re.findall(r"\bturnstream ([a-z]+)", README))
    assert {"send", "dev", "fsck"} <= commands
    app = build()
    assert not {command for command in commands if command not in app}
    targets = set(re.findall(r"\bmake ([a-z-]+)", README)) - {"help"}
    makefile = (ROOT / "Makefile").read_text()
    assert not {target for target in targets if f"\n{target}:" not in makefile}


def test_every_path_that_the_readme_names_exists() -> None:
    for path in re.findall(r"`((?:deploy|shared|services|tests)/[\w/.-]*)`", README):
        assert (ROOT / path).exists(), path
