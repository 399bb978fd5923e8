"""`demo`: the tour."""


async def demo() -> int:
    """Start everything and play a conversation through it."""
    return 0
