"""Episodes as the server's book holds them, and the book beside its ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinkerscript.ledger import Ledger
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics


def record(uuid: str, **fields: Any) -> EpisodeRecord:
    """The first episode for training, unless `fields` say otherwise."""
    given: dict[str, Any] = {"sequence": 1, "episode_type": "train", "group_id": "g", **fields}
    return EpisodeRecord(uuid=uuid, digest=b"", payload=b"", sample=b"", **given)


async def restored(ledger: Ledger, clock: Callable[[], float], **book: Any) -> Interchange:
    """What a new server makes of a ledger. `book`: of its `EpisodeBook`."""
    made = EpisodeBook(clock=clock, **book)
    metrics = ServerMetrics(made)
    interchange = Interchange(book=made, ledger=ledger, metrics=metrics, forget=(), clock=clock)
    await interchange.restore()
    return interchange
