"""What is compressed comes out as it was, also in other processes; what strangers wrote harms nobody."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import zstandard

from ledger_contract import MESSAGES, call, episode, made, put_calls, trained_once
from run_ledger import LedgerWriter
from tinkerscript.errors import NotRecordedError
from tinkerscript.files import CONFIG_FILE, LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.compression import (
    DICTIONARIES,
    DICTIONARY_BLOBS,
    PAYS_FROM,
    SMALL_BLOB,
    Packer,
    opened,
    packed,
    trained,
    unpacked,
)
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import CallRow, FactRow, TranscriptRow


def text(number: int) -> bytes:
    """A transcript that differs from others in a few bytes."""
    events = [{"event": "model", "uuid": f"{number:x}-{k}", "output": {"stop": "stop"}} for k in range(20)]
    return json.dumps({"id": f"sample-{number}", "events": events}).encode()


SHORT = [text(number) for number in range(DICTIONARY_BLOBS)]


def packer() -> Packer:
    """One that has a dictionary for transcripts."""
    packing = Packer(lambda table, samples: packing.use(table, trained(samples)))
    for each in SHORT:
        packing.pack("transcripts", each)
    return packing


SOME = [b"", b"x", text(99), text(1) * 50, bytes(PAYS_FROM), bytes(SMALL_BLOB + 1)]


@pytest.mark.parametrize("data", [*SOME, random.Random(0).randbytes(3000)], ids=len)
def test_data_comes_out_as_it_was(data: bytes) -> None:
    packing = packer()
    for table in ("transcripts", "calls"):
        stored = packing.pack(table, data)
        assert unpacked(stored, packing.dictionaries) == data
        assert len(stored) <= len(data) + 20


def test_too_few_bytes_train_nothing() -> None:
    assert trained([b"x"] * 5) == b""
    tried = list[str]()
    packing = Packer(lambda table, samples: tried.append(table))
    for _ in range(3 * DICTIONARY_BLOBS):
        assert packing.pack("calls", b"x") == b"x"
    assert tried == ["calls"], "and nothing tries again"


@pytest.mark.parametrize(
    "data",
    [
        *(b"garbage", b"", zstandard.FRAME_HEADER),
        *(packed(bytes(PAYS_FROM))[:-3], packed(bytes(SMALL_BLOB + 1)), zstandard.compress(b"")),
        zstandard.compress(packed(bytes(PAYS_FROM))),
    ],
    ids=["plain", "empty", "header", "cut", "large", "of nothing", "of a frame"],
)
def test_a_client_s_bytes_stay_unless_they_are_a_small_frame(data: bytes) -> None:
    assert opened(data) == data


def test_a_client_s_small_frame_is_opened() -> None:
    assert opened(zstandard.compress(text(1))) == text(1)


async def test_a_ledger_that_closes_finishes_its_dictionary(ledger: SqliteLedger, tmp_path: Path) -> None:
    await put_calls(ledger, [call(f"call-{number}", messages=MESSAGES) for number in range(DICTIONARY_BLOBS)])
    await ledger.close()
    again = SqliteLedger(tmp_path / LEDGER_FILE)
    assert len(await again.read(DICTIONARIES)) == 1
    await again.close()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("dictionary/calls/1", b"", "has no dictionary"),
        ("other", trained(SHORT), "has no dictionary"),
        ("dictionary/calls/1", trained(SHORT)[:9], "not packed bytes"),
        ("dictionary/calls/1", trained(SHORT)[:8] + bytes(4000), "not packed bytes"),
    ],
    ids=["empty", "none", "cut", "zeros"],
)
def test_a_stranger_s_dictionary_harms_nobody(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    frame = packer().pack("transcripts", text(99))
    with LedgerWriter(tmp_path) as run:
        run.put(FactRow(name=name, value=content), episode(), made(CallRow, 1, call=frame))
    with pytest.raises(NotRecordedError, match=says):
        LedgerReader(tmp_path).calls(1, 1)


def test_a_bomb_of_few_bytes_is_not_unpacked() -> None:
    known = packer().dictionaries
    small = zstandard.ZstdCompressor(dict_data=next(iter(known.values())))
    with pytest.raises(ValueError, match="10000000 bytes are packed, more than the limit of 1000000"):
        unpacked(small.compress(bytes(10**7)), known, limit=10**6)
    writer = zstandard.ZstdCompressor().compressobj()  # Its frames do not name their size.
    with pytest.raises(ValueError, match="not packed bytes"):
        unpacked(writer.compress(bytes(10**7)) + writer.flush(), limit=10**6)


async def test_transcripts_share_a_dictionary_of_their_own(ledger: SqliteLedger, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("{}")
    ledger.put(episode())
    for number, each in enumerate(SHORT):
        ledger.put(TranscriptRow(episode=1, attempt=number, transcript=each))
    await ledger.durable()
    reader = LedgerReader(tmp_path)
    assert reader.unpacked(reader.transcript(1, 1)) == SHORT[1], "before there is one"
    await trained_once(ledger)
    ledger.put(TranscriptRow(episode=1, attempt=DICTIONARY_BLOBS, transcript=text(99)))
    await ledger.close()
    named = reader.rows("SELECT name FROM facts WHERE name LIKE 'd%'")
    assert [name.split("/")[1] for (name,) in named] == ["transcripts"]
    assert reader.unpacked(reader.transcript(1, DICTIONARY_BLOBS)) == text(99)
    assert len(reader.transcript(1, DICTIONARY_BLOBS)) < 0.6 * len(packed(text(99)))
    with pytest.raises(ValueError, match="more than the limit of 9"):
        reader.unpacked(reader.transcript(1, DICTIONARY_BLOBS), limit=9)
