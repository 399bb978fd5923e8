"""Agents to try, each with a graph: they need no key. `turnstream dev` has them where no others are named."""

from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parent
"""A folder like those that `TURNSTREAM_AGENTS_DIR` names."""
