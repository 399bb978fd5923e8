"""The diagram in the README is drawn from the table of edges."""

from pathlib import Path

from turnstream.session.state import EDGES

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- states -->", "<!-- /states -->"


def drawn() -> str:
    """The table as a Mermaid diagram: an arrow for each pair of states, with the events that lead along it."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for status, events in EDGES.items():
        for event, followers in events.items():
            for follower in sorted(followers):
                arrows.setdefault((status or "[*]", follower), []).append(event)
        if not events:
            arrows[(status or "[*]", "[*]")] = []
    lines = [f"    {here} --> {there}" + (f": {', '.join(by)}" if by else "") for (here, there), by in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def test_the_readme_shows_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert BEGIN in text, f"the README has no {BEGIN}"
    block = text.split(BEGIN, 1)[1].split(END, 1)[0].strip()
    assert block == drawn(), f"put this between {BEGIN} and {END}:\n\n{drawn()}"
