from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from turnstream_runner.unicode import Joined, fit

ODD = st.text("a\0\ud83d\ude00\udc00é\u2028😀")


def test_only_what_cannot_be_stored_is_changed() -> None:
    odd = "\x07\x1b[0m \u2028\u2029\x85\x0b\x0c\x1c \ufeff e\u0301 👩‍👩‍👧 \r\n"
    assert fit(odd) is odd
    assert fit("\0 \ud83d\ude00 \ude00\ud83d") == "\ufffd 😀 \ufffd\ufffd"


@settings(deadline=None)
@given(ODD, st.lists(st.integers(0, 20)))
def test_a_text_in_pieces_is_the_text(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    joined = Joined()
    pieces = [joined.feed(text[start:end]) for start, end in pairwise(edges)]
    whole = "".join([*pieces, joined.end()])
    assert whole == fit(text)
    whole.encode()
