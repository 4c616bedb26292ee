"""The server's end of the link with its book and ledger: the server without HTTP and without a model."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from interchange_helpers import FAST
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.storage import StorageLimit
from tinkerscript.protocol import ClaimEpisodeRequest
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import Claim
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.trainer_messages import TrainerMessageHandler, read_last_commit
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.remote_sampling import LinkSampler
from tinkerscript.trainer_link.server_end import ServerLink


@dataclass
class Server:
    """The server without HTTP and without a model."""

    address: str
    link: ServerLink
    interchange: Interchange
    sampler: LinkSampler
    book: EpisodeBook
    metrics: ServerMetrics
    ledger: SqliteLedger
    handler: TrainerMessageHandler

    async def claim(self, client: str = "c", request_id: str = "") -> Claim:
        claimed = await self.interchange.claim(
            ClaimEpisodeRequest(client_uuid=client, sends_key=True, wait_s=10, claim_request_id=request_id)
        )
        assert not isinstance(claimed, str), claimed
        (claim,) = claimed
        return claim

    async def end(self, *claims: Claim, reward: float = 1.0) -> None:
        for each in claims:
            self.book.end(each.episode_uuid, each.attempt, reward=reward, result=b'{"reward":1.0}')
            await self.interchange.commit()

    async def end_next(self, number: int = 1) -> None:
        for _ in range(number):
            await self.end(await self.claim())

    def drops(self, reason: str) -> bool:
        return f'tinkerscript_link_drops_total{{reason="{reason}"}}'.encode() in self.metrics.render()


@asynccontextmanager
async def serving(
    address: str,
    folder: Path,
    *,
    timeout_s: float = 20,
    times: LinkTimes = FAST,
    epoch: int = 0,
    kind: type[SqliteLedger] = SqliteLedger,
) -> AsyncGenerator[Server]:
    """With the ledger in `folder`, new or as a server before left it."""
    ledger = kind(folder / LEDGER_FILE)
    clock = asyncio.get_running_loop().time
    book = EpisodeBook(clock=clock, max_attempts=2)
    metrics = ServerMetrics(book)
    server_id, drop = uuid.uuid4().hex, metrics.count_link_drop
    link = ServerLink(server_id=server_id, epoch=epoch, times=times, count_drop=drop)
    sampler = LinkSampler(link, timeout_s=timeout_s, times=times)
    interchange = Interchange(book=book, ledger=ledger, metrics=metrics, forget=(), clock=clock)
    await interchange.restore()
    handler = TrainerMessageHandler(
        interchange=interchange,
        ledger=ledger,
        link=link,
        sampler=sampler,
        metrics=metrics,
        times=times,
        last_commit=await read_last_commit(ledger),
        storage=StorageLimit(ledger, 0),
    )
    address = link.bind(address)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(handler.run())
            tasks.create_task(interchange.run())

    running = asyncio.create_task(run())
    try:
        yield Server(address, link, interchange, sampler, book, metrics, ledger, handler)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await ledger.close()
