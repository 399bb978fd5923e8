"""Server-sent events out of bytes, by the rules of the HTML standard (section 9.2.6, interpreting an event stream).

Lines end with LF, CR or CRLF and with nothing else: U+2028, U+0085 and their like are text. Data stays bytes, exactly
as sent. Unlike the standard, a frame without data counts too; an incomplete one at the end of the stream never does.
"""

from collections.abc import Iterator

import msgspec


class Frame(msgspec.Struct, frozen=True):
    """`id` is None where the frame itself has none; `event` is `message` where it says nothing else."""

    id: str | None
    event: str
    data: bytes


class Frames:
    """Cuts a stream that comes in chunks into frames."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._id: str | None = None
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        if self._after_cr and chunk.startswith(b"\n"):  # the second half of a CRLF
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\r", b"\n")) else b""
        for line in lines:
            line = line.rstrip(b"\r\n")
            if line:
                self._field(line)
            elif (frame := self._dispatch()) is not None:
                yield frame

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"event":
                self._event = value.decode()
            case b"id":
                self._id = value.decode()
            case _:  # a comment (its name is empty), `retry`, or a field that the standard ignores
                pass

    def _dispatch(self) -> Frame | None:
        if self._id is None and not self._event and not self._data:
            return None
        frame = Frame(self._id, self._event or "message", b"\n".join(self._data))
        self._id, self._event, self._data = None, "", []
        return frame
