"""What the same events fold into, release for release: a snapshot that one of them wrote is believed by the next.

`log.jsonl` is a log with every type of event in it, as it was stored; lines are added, none is ever changed.
`fold.json` holds the digest of the state after each of its events, and the version of the fold that came to it.
`python -m tests.golden.test_fold` writes it anew.
"""

import json
from pathlib import Path

import msgspec

from turnstream.ids import SessionKey, digest
from turnstream.log import codec
from turnstream.session.events import TYPES, Recorded
from turnstream.session.fold import evolve
from turnstream.session.snapshot import FOLD_VERSION
from turnstream.session.state import Session

FOLDER = Path(__file__).parent


class Line(msgspec.Struct):
    seq: int
    previous: int
    time: int
    record: msgspec.Raw


def stored() -> list[Recorded]:
    lines = msgspec.json.Decoder(Line).decode_lines((FOLDER / "log.jsonl").read_bytes())
    return [codec.decode(bytes(one.record), seq=one.seq, previous=one.previous, time=one.time) for one in lines]


def states() -> list[str]:
    """The digest of what each event makes of its session."""
    sessions: dict[SessionKey, Session] = {}
    found: list[str] = []
    for recorded in stored():
        key = recorded.event.key
        sessions[key] = evolve(sessions.get(key, Session(key=key)), recorded)
        found.append(digest(msgspec.json.encode(sessions[key]))[:16])
    return found


def test_s54_the_same_events_fold_into_the_same_state_or_the_fold_has_another_version() -> None:
    known = json.loads((FOLDER / "fold.json").read_bytes())
    differ = [n for n, (now, then) in enumerate(zip(states(), known["states"], strict=True), 1) if now != then]
    if known["version"] == FOLD_VERSION:
        assert not differ, f"event {differ[0]} folds into something else: raise MEANING in session/snapshot.py"
    assert known["version"] == FOLD_VERSION, "the fold has a new version: python -m tests.golden.test_fold"


def test_every_type_of_event_is_folded() -> None:
    assert {recorded.event.type for recorded in stored()} >= set(TYPES)


if __name__ == "__main__":
    text = json.dumps({"version": FOLD_VERSION, "states": states()}, indent=1)
    (FOLDER / "fold.json").write_text(text + "\n")
