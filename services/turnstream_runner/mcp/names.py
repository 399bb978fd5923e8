"""What a tool of a server is called by a model: `<server>__<tool>`.

Providers take few characters and few of them. A name that does not fit is made to: what is odd in it becomes `_`, what
is too long is cut, and a digest of the whole keeps it apart from others. The same tool always has the same name.
"""

import re
from collections.abc import Collection
from typing import Final

from turnstream.agents.mcp import tool_name
from turnstream.agents.tool import NAME
from turnstream.ids import digest

_MAX: Final = 64
_MARK: Final = 8
"""Characters of the digest."""


def safe(server: str, tool: str, taken: Collection[str] = ()) -> str:
    """The name as the model has it: none of those that are `taken` by others."""
    name = tool_name(server, tool)
    if NAME.fullmatch(name) and name not in taken:
        return name
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if not NAME.match(plain):
        plain = f"_{plain}"
    return f"{plain[: _MAX - _MARK - 1]}_{digest(f'{server} {tool}'.encode())[:_MARK]}"
