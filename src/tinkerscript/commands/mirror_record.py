"""`tinkerscript mirror`: the child process in which the server writes the record of a trainer elsewhere.

Reads `OfferRecord` and `RecordPart` from standard input, one at a time, and answers each on standard output;
ends when its input does.
"""

from __future__ import annotations

import logging
import sqlite3
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from tinkerscript.config import RunConfig, load_config
from tinkerscript.errors import ConfigError
from tinkerscript.record.mirror import Mirror
from tinkerscript.record.rows import MAX_BATCH_BYTES, Marks
from tinkerscript.trainer_link.framing import frames, read_to_server
from tinkerscript.trainer_link.messages import OfferRecord, PartTaken, RecordPart, RecordState, Tagged

logger = logging.getLogger(__name__)


class MirrorAnswers:
    """What a mirror says to each message of the trainer. Use `close` at the end."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        """`config`: the server's."""
        self._folder = folder
        self._config = config
        self._mirror: Mirror | None = None
        self._session = ""
        self._parts: list[bytes] = []
        self._batch = 0

    def answer(self, message: OfferRecord | RecordPart) -> Tagged:
        if isinstance(message, OfferRecord):
            return self._open(message)
        return self._take(message)

    def close(self) -> None:
        if self._mirror is not None:
            self._mirror.__exit__()
        self._mirror = None

    def _open(self, offer: OfferRecord) -> RecordState:
        self.close()
        self._session, self._parts = offer.session, []
        limits = [limit for limit in (offer.limit_mb, self._config.recording_limit_mb) if limit > 0]
        try:
            self._mirror = Mirror(
                self._folder,
                identity=offer.identity,
                limit_mb=min(limits, default=0),
                model=self._config.engine.model,
            )
            return self._state(0, self._mirror.marks())
        except (ConfigError, sqlite3.Error, OSError) as error:
            return self._refused(0, error)

    def _take(self, part: RecordPart) -> Tagged:
        """A batch is written when its last part is there."""
        if self._mirror is None or part.session != self._session:
            return RecordState(session=part.session, batch=part.batch)
        if part.part == 0:
            self._batch, self._parts = part.batch, []
        if (part.batch, part.part) != (self._batch, len(self._parts)):
            return self._refused(part.batch, f"part {part.part} is not the next one")
        self._parts.append(part.data)
        if sum(map(len, self._parts)) > MAX_BATCH_BYTES:
            return self._refused(part.batch, f"a batch has at most {MAX_BATCH_BYTES} bytes")
        if not part.is_last:
            return PartTaken(session=part.session, batch=part.batch, part=part.part)
        data, self._parts = b"".join(self._parts), []
        try:
            return self._state(part.batch, self._mirror.write(data))
        except (ValueError, sqlite3.Error, OSError) as error:
            return self._refused(part.batch, error)

    def _state(self, batch: int, marks: Marks) -> RecordState:
        return RecordState(session=self._session, batch=batch, marks=msgspec.msgpack.encode(marks))

    def _refused(self, batch: int, error: object) -> RecordState:
        logger.warning("mirror.refused batch=%d reason=%s", batch, error)
        self.close()
        self._parts = []
        return RecordState(session=self._session, batch=batch, problem=str(error)[:1000])


def mirror_command(folder: Path) -> int:
    """Answer until standard input ends. Raises ConfigError for a folder without a config."""
    answers = MirrorAnswers(folder, load_config(folder / "config.yaml"))
    try:
        while (frame := _frame(sys.stdin.buffer)) is not None:
            for message in read_to_server(frame):
                assert isinstance(message, OfferRecord | RecordPart)
                for reply in frames([answers.answer(message)]):
                    sys.stdout.buffer.write(len(reply).to_bytes(4, "big") + reply)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass  # The server is gone.
    finally:
        answers.close()
    return 0


def _frame(stream: BinaryIO) -> bytes | None:
    """The next one; None at the end."""
    length = int.from_bytes(stream.read(4), "big")
    frame = stream.read(length)
    return frame if frame and len(frame) == length else None
