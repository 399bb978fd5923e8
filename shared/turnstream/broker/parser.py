"""What the server sends, taken apart: nats-py's parser, made safe against what other programs put into a message.

A subject is any bytes but blanks, tabs and line ends. nats-py also parts it at vertical tabs and form feeds, and takes
what it then does not understand for the end of the connection: any program that may publish could cut off whoever
listens, again at each delivery. The server itself parts the line of a message by single blanks.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from nats.aio.client import Client
from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, Parser

Take = Callable[[int, bytes, bytes, bytes, bytes], Awaitable[None]]
"""Deals with a message: subscription, subject, reply subject, payload, headers (empty: none)."""

_END: Final = b"\r\n"


class SafeParser(Parser):
    """Takes messages apart by itself and leaves the rest of the protocol to nats-py."""

    def __init__(self, client: Client, take: Take) -> None:
        super().__init__(client)  # pyright: ignore[reportUnknownMemberType]
        self._take = take

    async def parse(self, data: bytes = b"") -> None:
        self.buf.extend(data)
        while self.buf:
            if self.state == AWAITING_MSG_PAYLOAD:
                if len(self.buf) < self.needed + len(_END):
                    return
                await self._finish()
                continue
            end = self.buf.find(_END)
            if end < 0:
                return
            size = end + len(_END)
            if self.buf.startswith((b"MSG ", b"HMSG ")):
                self._begin(bytes(self.buf[:end]))
                del self.buf[:size]
            else:
                await self._leave(size)

    def _begin(self, line: bytes) -> None:
        """`MSG <subject> <subscription> [reply subject] <size>`; `HMSG` has the headers' size before the last."""
        kind, *fields = line.split(b" ")
        try:
            needed = int(fields.pop())
            self.header_needed = int(fields.pop()) if kind == b"HMSG" else 0
            subject, sid, reply = fields if len(fields) == 3 else (*fields, b"")
            self.msg_arg = {"subject": subject, "sid": int(sid), "reply": reply}
        except (ValueError, IndexError):
            raise ProtocolError("nats: malformed MSG") from None
        self.needed = needed
        self.state = AWAITING_MSG_PAYLOAD

    async def _finish(self) -> None:
        """The message whose line was read is here as a whole."""
        headers = bytes(self.buf[: self.header_needed])
        payload = bytes(self.buf[self.header_needed : self.needed])
        del self.buf[: self.needed + len(_END)]
        self.state = AWAITING_CONTROL_LINE
        about = self.msg_arg
        await self._take(about["sid"], about["subject"], about["reply"], payload, headers)

    async def _leave(self, size: int) -> None:
        """To nats-py, this line and no more: it would go on with what comes behind it."""
        rest = self.buf[size:]
        line = self.buf = self.buf[:size]
        await super().parse()
        if self.buf is line:  # else the connection has begun anew
            self.buf.extend(rest)
