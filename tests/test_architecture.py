"""The house checks its own floors: import contracts (pyproject.toml), and what imports alone do not show."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = ROOT / "shared" / "turnstream"
SERVICES = ROOT / "services"
SOURCES = sorted(path for folder in (SHARED, SERVICES) for path in folder.rglob("*.py"))
CORE = sorted((SHARED / "session").glob("*.py"))
JETSTREAM = SHARED / "log" / "jetstream.py"

PURE = {
    "bisect",
    "codecs",
    "collections",
    "functools",
    "hashlib",
    "html",
    "itertools",
    "jsonschema_rs",
    "msgspec",
    "re",
    "struct",
    "turnstream",
    "typing",
    "unicodedata",
    "uuid",
    "zlib",
}
"""All that the core, the ids and the schemas may import."""
MAKES_THINGS_UP = {"uuid1", "uuid4", "getrandbits", "urandom", "open", "print", "input", "eval", "exec", "__import__"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside of functions, and every name that it imports from one."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{place(path)}: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(path: Path) -> Iterator[str]:
    """Dotted names that a file calls."""
    yield from (ast.unparse(node.func) for node in ast.walk(parse(path)) if isinstance(node, ast.Call))


def test_the_floors_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", [*CORE, SHARED / "ids.py", SHARED / "schemas.py"], ids=place)
def test_the_core_is_pure(path: Path) -> None:
    assert {name.split(".")[0] for name in imported(path)} <= PURE
    assert not {name.split(".")[-1] for name in called(path)} & MAKES_THINGS_UP
    awaits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Global, ast.Nonlocal)
    assert not [node for node in ast.walk(parse(path)) if isinstance(node, awaits)]


def test_only_an_app_builds_the_log_on_jetstream() -> None:
    others = [
        path for path in SOURCES if path != JETSTREAM and not (path.name == "app.py" and SERVICES in path.parents)
    ]
    users = [place(path) for path in others if "turnstream.log.jetstream" in set(imported(path))]
    assert users == []
    builders = [place(path) for path in others if any(name.split(".")[-1] == "JetStreamLog" for name in called(path))]
    assert builders == []


def test_only_the_log_writes_to_a_session() -> None:
    """Nobody else can name a session's subject: the words stand in `subjects.py`, and one module asks for them."""
    users = [place(path) for path in SOURCES if path != JETSTREAM and "subjects.session" in set(called(path))]
    assert users == []
    assert "subjects.session" in set(called(JETSTREAM))


def test_private_subjects_are_written_down_once() -> None:
    private = ("ts.session.", "ts.archive.", "ts.work.", "ts.timer.")
    found = [
        f"{place(path)}:{node.lineno}"
        for path in SOURCES
        if path != SHARED / "subjects.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(private)
    ]
    assert found == []
