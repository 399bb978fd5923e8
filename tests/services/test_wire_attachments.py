"""Attachments on a real server: put, found, claimed, released; what nobody claims expires, what is claimed never."""

import asyncio
import base64

import msgspec
import pytest

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerFault
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.session.events import Attachment, Blob
from turnstream.wire.attachments import CLAIMS_MAX, CONTENTS_MAX, Attachments, Interrupted, TooMany, blob_of
from turnstream.wire.blobs import BlobLost, Blobs
from turnstream_projector.expiry import Expiry

KEY = SessionKey("acme", "s1")
TYPE = "text/plain"


@pytest.fixture
def attachments(broker: Broker) -> Attachments:
    return Attachments(broker, Blobs(broker))


async def put(attachments: Attachments, data: bytes = b"hello", name: str = "notes.txt") -> Attachment:
    return (await attachments.put(KEY, name, TYPE, data))[0]


async def content(broker: Broker, attachment: Attachment) -> bytes:
    return await Blobs(broker).get(blob_of(attachment))


async def left(broker: Broker) -> tuple[int, int]:
    """Messages that records, and that bytes take."""
    records, blobs = [(await broker.stream(name)).state.messages for name in (subjects.ATTACHMENTS, "OBJ_blobs")]
    return records, blobs


async def expire(broker: Broker, attachments: Attachments) -> int:
    """As if everything had been there for long."""
    return (await attachments.expire(broker.clock.now() + 60_000))[0]


# -- putting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 300_000])
async def test_what_is_put_comes_back(broker: Broker, attachments: Attachments, size: int) -> None:
    data = b"x" * size
    attachment, is_new = await attachments.put(KEY, "Übersicht 🌍.txt", TYPE, data)
    assert is_new and (attachment.name, attachment.media_type, attachment.size) == ("Übersicht 🌍.txt", TYPE, size)
    assert await attachments.find(KEY, "Übersicht 🌍.txt") == attachment
    assert await content(broker, attachment) == data
    assert await attachments.find(KEY, "Übersicht") is None
    assert await attachments.find(SessionKey("rival", "s1"), attachment.name) is None
    assert await attachments.find(SessionKey("acme", "s1x"), attachment.name) is None


async def test_the_same_again_changes_nothing_and_another_content_is_another_reference(
    broker: Broker, attachments: Attachments
) -> None:
    first = await put(attachments, b"first")
    assert await attachments.put(KEY, "notes.txt", TYPE, b"first") == (first, False)
    second = await put(attachments, b"second")
    assert await attachments.find(KEY, "notes.txt") == second
    assert await attachments.find(KEY, "notes.txt", first.sha256) == first
    assert (await content(broker, first), await content(broker, second)) == (b"first", b"second")
    assert await attachments.put(KEY, "notes.txt", TYPE, b"first") == (first, False)
    assert await attachments.find(KEY, "notes.txt") == first, "what was put last"
    other, is_new = await attachments.put(KEY, "notes.txt", "text/markdown", b"first")
    assert is_new and other.media_type == "text/markdown"
    assert await attachments.find(KEY, "notes.txt", "0" * 64) is None


async def test_a_name_has_only_so_many_contents(attachments: Attachments) -> None:
    await asyncio.gather(*(put(attachments, b"%d" % n) for n in range(CONTENTS_MAX)))
    with pytest.raises(TooMany):
        await put(attachments, b"one more")
    assert await put(attachments, b"7")


async def test_many_at_once_lose_nothing(broker: Broker, attachments: Attachments) -> None:
    same = await asyncio.gather(*(attachments.put(KEY, "same", TYPE, b"same") for _ in range(20)))
    assert len({attachment.blob for attachment, _ in same}) == 1 and sum(is_new for _, is_new in same) == 1
    assert await left(broker) == (1, 2), "whoever was slower has left nothing"
    several = await asyncio.gather(*(put(attachments, b"%d" % n, "several") for n in range(20)))
    assert {await content(broker, one) for one in several} == {b"%d" % n for n in range(20)}
    assert {(await attachments.find(KEY, "several", one.sha256)) for one in several} == set(several)


class Torn(Blobs):
    """Stores a part of the bytes and then fails, or does what it is told to in the middle."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def put(self, key: SessionKey, name: str, data: bytes) -> Blob:
        blob = await super().put(key, name, data)
        self.reached.set()
        await self.go_on.wait()
        return blob


async def test_an_upload_that_is_given_up_leaves_nothing(broker: Broker) -> None:
    torn = Torn(broker)
    uploading = asyncio.create_task(Attachments(broker, torn).put(KEY, "notes.txt", TYPE, b"hello"))
    await torn.reached.wait()
    assert await Attachments(broker, torn).find(KEY, "notes.txt") is None, "not before it is all there"
    assert await Attachments(broker, torn).claim(KEY, "notes.txt", None, "c1") is None
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert await left(broker) == (0, 0)


async def test_an_upload_whose_process_died_expires_and_a_slow_one_gives_up(broker: Broker) -> None:
    torn = Torn(broker)
    attachments = Attachments(broker, torn)
    uploading = asyncio.create_task(attachments.put(KEY, "notes.txt", TYPE, b"hello"))
    await torn.reached.wait()
    assert await expire(broker, attachments) == 1
    assert await left(broker) == (0, 0)
    torn.go_on.set()
    with pytest.raises(Interrupted):
        await uploading
    assert await left(broker) == (0, 0)


async def test_an_upload_into_a_session_that_is_erased_meanwhile_leaves_nothing(broker: Broker) -> None:
    torn = Torn(broker)
    attachments = Attachments(broker, torn)
    uploading = asyncio.create_task(attachments.put(KEY, "notes.txt", TYPE, b"hello"))
    await torn.reached.wait()
    await attachments.erase(KEY)
    torn.go_on.set()
    with pytest.raises(Interrupted):
        await uploading
    assert await left(broker) == (0, 0)


# -- claiming ---------------------------------------------------------------------------------------------------------


async def test_what_nobody_claims_expires_and_what_is_claimed_stays(broker: Broker, attachments: Attachments) -> None:
    loose, claimed = await put(attachments, b"loose", "loose"), await put(attachments, b"claimed", "claimed")
    assert await attachments.claim(KEY, "claimed", None, "c1") == claimed
    assert (await attachments.expire(broker.clock.now() - 60_000))[0] == 0, "not before its time"
    assert await expire(broker, attachments) == 1
    assert await attachments.find(KEY, "loose") is None
    with pytest.raises(BlobLost):
        await content(broker, loose)
    assert await attachments.claim(KEY, "loose", None, "c2") is None
    assert await attachments.find(KEY, "claimed") == claimed
    assert await content(broker, claimed) == b"claimed"
    assert await left(broker) == (1, 2)
    assert await expire(broker, attachments) == 0


async def test_of_one_name_only_the_contents_expire_that_nobody_claims(
    broker: Broker, attachments: Attachments
) -> None:
    first, second, third = [await put(attachments, data) for data in (b"1", b"2", b"3")]
    assert await attachments.claim(KEY, "notes.txt", second.sha256, "c1") == second
    assert await expire(broker, attachments) == 2
    assert await attachments.find(KEY, "notes.txt") == second
    assert [await attachments.find(KEY, "notes.txt", one.sha256) for one in (first, third)] == [None, None]
    again = await put(attachments, b"3")
    assert again.blob != third.blob and await content(broker, again) == b"3"


async def test_what_is_released_by_everybody_expires(broker: Broker, attachments: Attachments) -> None:
    one = await put(attachments)
    for claim in ("c1", "c2", "c1"):
        assert await attachments.claim(KEY, "notes.txt", None, claim) == one
    await attachments.release(KEY, [one], "c1")
    await attachments.release(KEY, [one], "c1")
    assert await expire(broker, attachments) == 0, "somebody has it still"
    await attachments.release(KEY, [one], "c2")
    assert await expire(broker, attachments) == 1
    assert await left(broker) == (0, 0)
    await attachments.release(KEY, [one], "c2")
    assert await left(broker) == (0, 0)


async def test_what_very_many_have_claimed_is_kept_for_good(broker: Broker, attachments: Attachments) -> None:
    one = await put(attachments)
    claims = [f"c{n}" for n in range(CLAIMS_MAX + 3)]
    await asyncio.gather(*(attachments.claim(KEY, "notes.txt", None, claim) for claim in claims))
    await asyncio.gather(*(attachments.release(KEY, [one], claim) for claim in claims))
    assert await expire(broker, attachments) == 0
    assert await content(broker, one) == b"hello"


async def test_a_claim_and_an_expiry_at_once_never_both_succeed(broker: Broker, attachments: Attachments) -> None:
    won = 0
    for n in range(40):
        one = await put(attachments, b"%d" % n, f"race-{n}")
        claimed, expired = await asyncio.gather(
            attachments.claim(KEY, one.name, None, "c1"), expire(broker, attachments)
        )
        if claimed:
            assert await content(broker, claimed) == b"%d" % n
            assert await attachments.find(KEY, one.name) == one
        else:
            assert expired == 1
            with pytest.raises(BlobLost):
                await content(broker, one)
        won += claimed is not None
    assert won, "at least once the claim was first"


async def test_two_that_remove_at_once_are_in_nobodys_way(broker: Broker, attachments: Attachments) -> None:
    for n in range(10):
        await put(attachments, b"x", f"{n}")
        if n % 2:
            await attachments.claim(KEY, f"{n}", None, "c1")
    both = await asyncio.gather(expire(broker, attachments), expire(broker, attachments))
    assert sum(both) >= 5, "one may find what the other is at"
    assert await left(broker) == (5, 10)


# -- the service ------------------------------------------------------------------------------------------------------


async def test_the_projector_looks_at_each_once(broker: Broker, attachments: Attachments) -> None:
    expiry = Expiry(attachments, broker.clock, every=60, after=0)
    kept = await put(attachments, b"kept", "kept")
    await attachments.claim(KEY, "kept", None, "c1")
    await put(attachments)
    await broker.nc.flush()
    assert await expiry.once() == 1
    seen = expiry._seen
    assert seen and await expiry.once() == 0 and expiry._seen == seen
    await put(attachments, b"again")
    assert await expiry.once() == 1
    await broker.api(f"STREAM.DELETE.{subjects.ATTACHMENTS}")
    assert await expiry.once() == 0
    await put(attachments, b"anew")
    assert await expiry.once() == 1, "sequences have begun anew"
    assert await content(broker, kept) == b"kept"


# -- what is left -----------------------------------------------------------------------------------------------------


async def test_nothing_that_is_gone_lies_in_the_files(
    broker: Broker, attachments: Attachments, own_nats: NatsServer
) -> None:
    """Names are secrets, too: what is changed or removed is overwritten."""
    word = "marzipan"
    forms = [word.encode(), base64.urlsafe_b64encode(word.encode()).rstrip(b"=")[:-1]]

    def lies() -> list[bool]:
        files = [file.read_bytes() for file in own_nats.store.rglob("*.blk")]
        return [any(form in data for data in files) for form in forms]

    await put(attachments, word.encode() * 1000, f"{word}.txt")
    await attachments.claim(KEY, f"{word}.txt", None, "c1")
    await put(attachments, b"2", f"{word}.txt")
    await put(attachments, word.encode() * 1000, f"{word} too")
    assert await expire(broker, attachments) == 2
    assert lies() == [True, True]
    await Blobs(broker).erase(KEY)
    await attachments.erase(KEY)
    assert await left(broker) == (0, 0)
    assert lies() == [False, False]


async def test_s56_a_bucket_that_somebody_deleted_is_made_again(broker: Broker, attachments: Attachments) -> None:
    one = await put(attachments)
    await broker.api(f"STREAM.DELETE.{subjects.ATTACHMENTS}")
    assert await attachments.find(KEY, "notes.txt") is None
    assert await attachments.claim(KEY, "notes.txt", None, "c1") is None
    again = await put(attachments)
    assert again.sha256 == one.sha256 and await content(broker, again) == b"hello"
    await broker.api(f"STREAM.DELETE.{subjects.ATTACHMENTS}")
    await attachments.erase(KEY)
    with pytest.raises(BrokerFault):
        await attachments._write(KEY, "eA", None, ())
    assert await attachments.find(KEY, "notes.txt") is None


async def test_any_client_of_buckets_reads_what_a_name_means(broker: Broker, attachments: Attachments) -> None:
    one = await put(attachments)
    bucket = await broker.nc.jetstream().key_value("attachments")
    token = base64.urlsafe_b64encode(b"notes.txt").decode().rstrip("=")
    entry = await bucket.get(f"acme.s1.{token}")
    assert msgspec.json.decode(entry.value)[0]["attachment"]["blob"] == one.blob
