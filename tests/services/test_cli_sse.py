"""Server-sent events out of bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from turnstream_cli.sse import Frame, Frames

EVENT = 'id: 7\nevent: run.ended\ndata: {"text":"a\u2028b\u2029c\u0085d\x0b\x0c\x1c"}\n\n'.encode()
STREAM = (
    b": keep-alive\n\n"
    + EVENT
    + b"event: bye\ndata:\n\n"
    + b"data: one\r\ndata:two\r\rretry: 5\n\nid: 8\ndata: never ends"
)


def frames(*chunks: bytes) -> list[Frame]:
    parser = Frames()
    return [frame for chunk in chunks for frame in parser.feed(chunk)]


def test_a38_only_cr_lf_and_crlf_end_a_line() -> None:
    assert frames(EVENT) == [
        Frame("7", "run.ended", '{"text":"a\u2028b\u2029c\u0085d\x0b\x0c\x1c"}'.encode()),
    ]


def test_a_frame_ends_with_an_empty_line_and_an_incomplete_one_is_none() -> None:
    assert [(frame.id, frame.event, frame.data) for frame in frames(STREAM)[1:]] == [
        (None, "bye", b""),
        (None, "message", b"one\ntwo"),
    ]


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12))
def test_it_does_not_matter_where_the_stream_is_cut_into_chunks(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in pairwise(edges)]
    assert frames(*chunks) == frames(STREAM)
