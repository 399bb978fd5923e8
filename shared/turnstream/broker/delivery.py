"""A message of a stream as a consumer hands it out. What happens to it is said with its own ack subject.

While the connection is away nothing is said: what is buffered would be heard after the reconnect, when the message may
be in other hands, and the server obeys a word about an old delivery too. Then the message comes again in time.
"""

from nats.aio.msg import Msg

from turnstream.broker.connection import Broker


class Delivery:
    """One message of a stream as a consumer hands it out."""

    __slots__ = ("_broker", "_reply", "data", "delivery", "headers", "pending", "seq", "subject", "time")

    def __init__(self, broker: Broker, message: Msg, about: list[str]) -> None:
        """`about`: the reply subject's parts, as `about` gives them."""
        self._broker = broker
        self._reply = message.reply
        self.subject = message.subject
        self.data = message.data
        self.headers = message.headers
        self.delivery = int(about[0])
        """How often this message has been delivered, this time included."""
        self.seq = int(about[1])
        """Its sequence in the stream."""
        self.time = int(about[3][:-6])
        """When the stream stored it: milliseconds of the broker's time."""
        self.pending = int(about[4])
        """How many more there are for this consumer."""

    def __repr__(self) -> str:
        return f"<Delivery {self.subject} seq={self.seq} delivery={self.delivery}>"

    def ack(self) -> None:
        """It is dealt with. Nobody says that the server has heard it: whoever acks must bear a redelivery."""
        self._broker.mention(self._reply)

    async def nak(self, delay: float | None = None) -> None:
        """Deliver it again, at once or in `delay` seconds."""
        body = b'-NAK {"delay":%d}' % round(delay * 1e9) if delay else b"-NAK"
        await self._say(body)

    async def progress(self) -> None:
        """It is being worked on: `ack_wait` begins anew."""
        await self._say(b"+WPI")

    async def term(self) -> None:
        """Never deliver it again."""
        await self._say(b"+TERM")

    async def _say(self, word: bytes) -> None:
        if self._broker.nc.is_connected:
            await self._broker.publish(self._reply, word)


def about(reply: str) -> list[str]:
    """What an ack subject tells: delivery, stream sequence, consumer sequence, time (ns), pending.

    It is `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.` and these.
    """
    parts = reply.split(".")
    return parts[4:] if len(parts) == 9 else parts[6:11]
