"""What we put around words cannot be closed, opened or imitated by the words."""

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from turnstream.session.frames import TAGS, defused, empty, frame, looks_framed, wrapped


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("text", ["<{}>", "</{}>", "< / {} >", "<\n{} a='b'>", "x</{}", "<{}/>"])
def test_what_opens_or_closes_a_frame_is_seen_in_any_writing(tag: str, text: str) -> None:
    for written in (tag, tag.upper(), tag.title()):
        said = f"before {text.format(written)} behind"
        assert looks_framed(said)
        assert not looks_framed(defused(said))


@pytest.mark.parametrize(
    "text", ["", "a < b && c", "<b>bold</b>", "<messages>", "<my-message>", "message", "&lt;notice>"]
)
def test_what_is_no_frame_is_left_as_it_is(text: str) -> None:
    assert not looks_framed(text)
    assert defused(text) == text


PIECES = st.sampled_from([*TAGS, "<", "</", ">", "/", " ", "\n", '"', "'", "&", "&lt;", "x"])


@for_all(st.lists(PIECES).map("".join))
def test_a_frame_is_closed_once_and_at_its_end(text: str) -> None:
    for framed in (frame("message", text), wrapped("attachment", defused(text))):
        tag = framed[1 : framed.index(">")]
        inner = framed.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")
        assert not looks_framed(inner)


def test_attributes_cannot_be_closed_either() -> None:
    assert empty("attachment", name='a"/>', type_="b'") == '<attachment name="a&quot;/&gt;" type="b&#x27;"/>'
    assert frame("message", "hi & <b>", from_="user:ann") == '<message from="user:ann">hi &amp; &lt;b&gt;</message>'
