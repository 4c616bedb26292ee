"""The link's two ends against each other: delivery, repetition, takeover, and what is dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from gateway_bench import WaitingSampler
from interchange_helpers import (
    FAST,
    collect,
    consumed,
    eventually,
    new_episode,
    new_episodes,
    scripted,
    trainer,
    until,
)
from link_server import Server, serving
from tinkerscript.errors import ConfigError, ConflictError, EngineError, GatewayError, LinkError
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.history import History, Tally
from tinkerscript.ledger.ledger import WriteBatch
from tinkerscript.ledger.rows import PublicationRow, ResumptionRow
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import read_episodes
from tinkerscript.server.trainer_messages import OutcomeStream, TrainerMessageHandler
from tinkerscript.trainer_link.framing import LinkTimes, Outbox, frames, read_to_server, read_to_trainer
from tinkerscript.trainer_link.messages import (
    LINK_VERSION,
    Cancel,
    CancelSample,
    Commit,
    Committed,
    EpisodeAccepted,
    EpisodeFailed,
    Hello,
    NewEpisode,
    Received,
    Refused,
    Register,
    Resume,
    Resumed,
    Sample,
    Stop,
    Tagged,
    check_episode,
)
from tinkerscript.trainer_link.server_end import LinkEvent, ServerLink
from tinkerscript.trainer_link.trainer_end import TrainerLink

REQUEST = SampleRequest(prompt=pack_ids([1, 2, 3]), max_tokens=4)


def losing(monkeypatch: pytest.MonkeyPatch, number: int = 1) -> list[int]:
    """From now on the numbers of the results that the server sends, of which the first `number` get lost."""
    sent, send = list[int](), ServerLink.send

    def noted(link: ServerLink, message: Tagged) -> None:
        if isinstance(message, EpisodeAccepted):
            sent.append(message.number)
            if len(sent) <= number:
                return
        send(link, message)

    monkeypatch.setattr(ServerLink, "send", noted)
    return sent


def losing_the_first(monkeypatch: pytest.MonkeyPatch, kind: type[LinkEvent]) -> list[LinkEvent]:
    """What the server never gets: the first message of a kind."""
    handle, lost = TrainerMessageHandler.handle, list[LinkEvent]()

    def handled(handler: TrainerMessageHandler, event: LinkEvent) -> None:
        if isinstance(event, kind) and not lost:
            lost.append(event)
        else:
            handle(handler, event)

    monkeypatch.setattr(TrainerMessageHandler, "handle", handled)
    return lost


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next outcome waits until the trainer has taken the one that is on its way."""
    for name in ("AT_ONCE", "MAX_ON_THE_WAY"):
        monkeypatch.setattr(f"tinkerscript.server.trainer_messages.{name}", 1)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link.ipc" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
def ipc(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link.ipc"


@pytest.fixture
async def server(ipc: str, tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(ipc, tmp_path) as started:
        yield started


@pytest.fixture
async def link(server: Server) -> AsyncIterator[TrainerLink]:
    """Of a trainer that has not resumed yet."""
    async with trainer(server.address) as started:
        yield started


async def test_an_episode_goes_there_and_back(address: str, tmp_path: Path) -> None:
    async with serving(address, tmp_path) as server, trainer(server.address) as link:
        assert await link.resume([]) == History()
        await link.register([new_episode("e", "eval", b'{"a": 1}')])
        (stored,) = (await read_episodes(server.ledger)).present
        assert (stored.payload, stored.label) == (b'{"a": 1}', "before"), "confirmed means stored"
        link.set_status(policy_version=3, global_step=2)
        await link.flush()
        assert await link.tally() == Tally(lost=1)
        episode = await server.claim()
        assert episode.policy_version == 3
        await server.end(episode, reward=0.5)
        outcomes = await collect(link, 1)
        outcome = outcomes["e"]
        assert isinstance(outcome, EpisodeAccepted)
        assert (outcome.episode_type, outcome.reward, outcome.attempt) == ("eval", 0.5, 1)
        await link.commit(consumed(outcomes, step=0))
        (stored,) = (await read_episodes(server.ledger)).present
        assert stored.status == "accepted"
        assert await link.tally() == Tally(eval_accepted=1)


async def test_many_episodes_are_registered_in_order(address: str, tmp_path: Path) -> None:
    names = [f"e{number}" for number in range(1300)]
    async with serving(address, tmp_path) as server, trainer(server.address) as link:
        await link.register(new_episodes(*names))
        await link.register(new_episodes(*names))
        assert [episode.uuid for episode in server.book] == names


async def test_large_samples_are_registered_few_at_a_time_and_a_group_too_large_is_refused(
    server: Server, link: TrainerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they have more bytes than a message carries; so has the last group alone."""
    monkeypatch.setattr("tinkerscript.trainer_link.framing.MAX_MESSAGE_BYTES", 5000)
    monkeypatch.setattr("tinkerscript.trainer_link.trainer_end.FULL_FRAME_BYTES", 2000)
    payload = b'{"image": "%s"}' % (b"x" * 1000)

    def samples(groups: int, size: int) -> list[NewEpisode]:
        return [
            msgspec.structs.replace(new_episode(payload=payload), group_id=f"{size}-{group}")
            for group in range(groups)
            for _ in range(size)
        ]

    await link.register(samples(groups=5, size=3))
    with pytest.raises(LinkError, match=r"the group '6-0' cannot be registered: .* carries 5000"):
        await link.register(samples(groups=1, size=6))
    await link.register(samples(groups=1, size=2))
    assert len(server.book) == 17
    publication = PublicationRow(policy_version=0, step=0, time=1.0)
    with pytest.raises(LinkError, match=r"Commit of .* carries 5000"):
        await link.commit([publication] * 1000)


async def test_a_large_answer_fails_its_request(link: TrainerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that waited for it would wait for good."""
    await link.commit([PublicationRow(policy_version=n, step=0, time=1.0) for n in range(200)])
    monkeypatch.setattr("tinkerscript.trainer_link.framing.MAX_MESSAGE_BYTES", 400)
    async with asyncio.timeout(20):
        with pytest.raises(LinkError, match=r"Resumed of .* a message carries 400"):
            await link.resume([])


async def test_registering_what_cannot_be_is_refused(server: Server, link: TrainerLink) -> None:
    await link.register([new_episode("e")])
    with pytest.raises(ConflictError, match="other content"):
        await link.register([new_episode("e", payload=b"{}"), new_episode("f")])
    with pytest.raises(ValueError, match="JSON object"):
        await link.register([new_episode("g", payload=b"[1]")])
    with pytest.raises(ValueError, match="twice"):
        await link.register([new_episode("g"), new_episode("g")])
    with pytest.raises(ValueError, match="1 to 200 are allowed"):
        await link.register([new_episode("g" * 201)])
    await link.register([])
    assert {episode.uuid for episode in server.book} == {"e", "f"}


async def test_a_registration_that_gets_lost_is_repeated(ipc: str, tmp_path: Path) -> None:
    """No server listens when the trainer registers; one that starts later gets it."""
    async with trainer(ipc) as link:
        registering = asyncio.create_task(link.register(new_episodes("e")))
        async with serving(ipc, tmp_path) as server:
            await registering
            assert len(server.book) == 1


async def test_a_trainer_gets_outcomes_again_until_it_uses_them(address: str, tmp_path: Path) -> None:
    async with serving(address, tmp_path) as server:
        async with trainer(server.address) as link:
            await link.register(new_episodes("e"))
            await server.end(await server.claim())
            waiting = asyncio.create_task(link.outcomes())
            await link.flush()
            done, _ = await asyncio.wait({waiting}, timeout=4 * FAST.resend_s)
            assert not done, "it has not said where it goes on"
            await link.resume([])
            assert [each.episode_uuid for each in await waiting] == ["e"]
        async with trainer(server.address) as link:
            history = await link.resume([])
            assert (history.resumption, history.open_until) == (2, 1)
            assert [each.episode_uuid for each in history.planned] == ["e"]
            outcomes = await collect(link, 1)
            assert set(outcomes) == {"e"}, "a new trainer has it from the server"
            await link.commit(consumed(outcomes))
        assert server.book.get("e").status == "accepted"
        assert not server.book.open_ends


@pytest.mark.usefixtures("one_at_a_time")
async def test_outcomes_come_in_their_order_and_few_at_a_time(
    server: Server, link: TrainerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one gets lost."""
    sent = losing(monkeypatch)
    names = [f"e{number}" for number in range(5)]
    await link.register(new_episodes(*names))
    claims = [await server.claim() for _ in names]
    await server.end(*reversed(claims))
    await link.resume([])
    await until(lambda: len(sent) > 1, "the first one is repeated")
    await link.flush()
    assert set(sent) == {1}
    assert [*await collect(link, 5)] == names[::-1]
    assert [*dict.fromkeys(sent)] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("one_at_a_time")
async def test_what_a_trainer_has_and_does_not_take_yet_is_not_sent_again(
    server: Server, link: TrainerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while its engine loads. Then it takes them, and says so again if that gets lost."""
    sent, looked, confirmed = losing(monkeypatch, 0), list[int](), list[int]()
    received, repeat = OutcomeStream.received, OutcomeStream.repeat

    def looking(stream: OutcomeStream) -> None:
        looked.append(len(sent))
        repeat(stream)

    def lose_the_first(stream: OutcomeStream, position: int) -> None:
        confirmed.append(position)
        if len(confirmed) > 1:
            received(stream, position)

    monkeypatch.setattr(OutcomeStream, "repeat", looking)
    monkeypatch.setattr(OutcomeStream, "received", lose_the_first)
    await link.resume([])
    await link.register(new_episodes("a", "b"))
    await server.end_next(2)
    await until(lambda: looked.count(1) > 4, "several looks at what is under way")
    assert sent == [1]
    assert [*await collect(link, 2)] == ["a", "b"]
    assert sent == [1, 2]
    assert confirmed[:2] == [1, 1]


async def test_an_outcome_is_not_taken_before_one_that_got_lost(
    server: Server, link: TrainerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = losing(monkeypatch)
    await link.resume([])
    await link.register(new_episodes("a", "b"))
    await server.end_next(2)
    assert [*await collect(link, 2)] == ["a", "b"]
    assert sent[:3] == [1, 2, 1]


async def test_an_outcome_that_cannot_be_sent_takes_none_before_it_along(
    server: Server, link: TrainerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer reconnects, without the outcomes before it, while the ledger is told that it has failed."""
    monkeypatch.setattr("tinkerscript.server.trainer_messages.MAX_MESSAGE_BYTES", 10_000)
    give_up, send, lost = EpisodeBook.give_up, ServerLink.send, list[Tagged]()
    streams = list[OutcomeStream]()
    follow = OutcomeStream.follow

    def following(stream: OutcomeStream, position: int) -> None:
        streams.append(stream)
        follow(stream, position)

    def reconnect_meanwhile(book: EpisodeBook, uuid: str, reason: str) -> EpisodeRecord:
        given_up = give_up(book, uuid, reason)
        monkeypatch.setattr(ServerLink, "send", send)
        streams[-1].follow(0)
        return given_up

    def lose_outcomes(link: ServerLink, message: Tagged) -> None:
        (lost.append if isinstance(message, EpisodeAccepted) else partial(send, link))(message)

    monkeypatch.setattr(OutcomeStream, "follow", following)
    monkeypatch.setattr(EpisodeBook, "give_up", reconnect_meanwhile)
    await link.register(new_episodes("a", "b", "large"))
    for result in (b"{}", b"{}", b'{"metadata": {"log": "%s"}}' % (b"x" * 10_000)):
        claim = await server.claim()
        server.book.end(claim.episode_uuid, claim.attempt, reward=1.0, result=result)
    await server.interchange.commit()
    monkeypatch.setattr(ServerLink, "send", lose_outcomes)
    await link.resume([])
    assert [*await collect(link, 3)] == ["a", "b", "large"]
    assert len(lost) == 2


async def test_a_trainer_that_repeats_its_request_begins_once(
    ipc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes again, and nothing is given up that it has registered since."""
    handle = TrainerMessageHandler.handle
    requests = list[tuple[TrainerMessageHandler, Resume]]()

    def twice(handler: TrainerMessageHandler, event: LinkEvent) -> None:
        handle(handler, event)
        if isinstance(event, Resume):
            requests.append((handler, event))
            handle(handler, event)

    monkeypatch.setattr(TrainerMessageHandler, "handle", twice)
    async with serving(ipc, tmp_path) as server, trainer(server.address) as link:
        assert (await link.resume([])).resumption == 1
        await link.register([new_episode("e", "eval")])
        handle(*requests[0])
        await server.end(await server.claim())
        assert [*await collect(link, 1)] == ["e"]
        assert [each.resumption for each in await server.ledger.rows(ResumptionRow)] == [1]


async def test_a_resumption_without_its_steps_is_refused(server: Server, link: TrainerLink) -> None:
    with pytest.raises(ConfigError, match="ends with step 0, before the checkpoint of step 5"):
        await link.resume([5])
    assert not await server.ledger.rows(ResumptionRow)


async def test_commits_are_carried_out_once(
    ipc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the first does not arrive, and the server ends before it has confirmed the others."""
    send, lost = ServerLink.send, losing_the_first(monkeypatch, Commit)

    def unconfirmed(link: ServerLink, message: Tagged) -> None:
        if not isinstance(message, Committed):
            send(link, message)

    async with trainer(ipc) as link:
        async with serving(ipc, tmp_path) as server:
            with monkeypatch.context() as patched:
                patched.setattr(ServerLink, "send", unconfirmed)
                for version in range(3):
                    link.note([PublicationRow(policy_version=version, step=0, time=float(version))])

                async def all_written() -> bool:
                    return len(await server.ledger.rows(PublicationRow)) == 3

                await eventually(all_written)
        async with serving(ipc, tmp_path) as server:
            await link.commit([PublicationRow(policy_version=3, step=0, time=3.0)])
            await link.commit()
            published = await server.ledger.rows(PublicationRow, "ORDER BY rowid")
            assert [each.policy_version for each in published] == [0, 1, 2, 3]
        assert len(lost) == 1


async def test_a_request_that_cannot_be_carried_out_fails_alone(
    server: Server, link: TrainerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LinkError, match=r"Fetch failed at the server: ValueError: not enough values"):
        await link.fetch([99])
    assert server.drops("failed")
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeBook, "planned_groups", None)
        with pytest.raises(LinkError, match=r"Resume failed at the server: TypeError"):
            await link.resume([])
    assert await link.tally() == Tally()
    assert (await link.resume([])).step == 0


async def test_one_trainer_gets_an_outcome_once_while_it_holds_it(server: Server, link: TrainerLink) -> None:
    await link.resume([])
    await link.register(new_episodes("e", "f"))
    await server.end(await server.claim())
    assert set(await collect(link, 1)) == {"e"}
    await server.end(await server.claim())
    assert [outcome.episode_uuid for outcome in await link.outcomes()] == ["f"]
    waiting = asyncio.create_task(link.outcomes())
    done, _ = await asyncio.wait({waiting}, timeout=4 * FAST.resend_s)
    assert not done, "neither is handed out twice, however often the server repeats it"
    waiting.cancel()


async def test_the_trainer_goes_on_over_a_restart_of_the_server(address: str, tmp_path: Path) -> None:
    async with serving(address, tmp_path) as server:
        address = server.address
        link = trainer(address)
        await link.__aenter__()
        await link.resume([])
        await link.register(new_episodes("a", "b"))
        ended = await server.claim()
        await server.end(ended)
    async with serving(address, tmp_path) as server:
        await link.register(new_episodes("c"))
        assert set(await collect(link, 1)) == {"a"}
        assert (await server.claim()).episode_uuid == "b"
        await link.__aexit__(None, None, None)


async def test_failures_are_outcomes_with_every_reason(server: Server, link: TrainerLink) -> None:
    await link.resume([])
    await link.register(new_episodes("e", "f"))
    for kind in ("task_error", "worker_died"):
        claim = await server.claim()
        if kind == "task_error":
            server.interchange.book.abort("e", 1, Failure(kind=kind, message="boom"))
            await server.interchange.commit()
        else:
            link.release_client("c", "SIGKILL")
            await link.flush()
        assert claim.episode_uuid == "e"
    link.cancel(["f", "unknown"], "enough groups")
    found = await collect(link, 2)
    reasons = {
        name: [(f["kind"], f["message"]) for f in outcome.failures]
        for name, outcome in found.items()
        if isinstance(outcome, EpisodeFailed)
    }
    assert reasons == {
        "e": [("task_error", "boom"), ("worker_died", "SIGKILL")],
        "f": [("cancelled", "enough groups")],
    }
    assert server.drops("unknown_episode")


async def test_what_the_ledger_has_is_told(ipc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkerscript.trainer_link.trainer_end.FETCHED_AT_ONCE", 2)
    async with trainer(ipc) as link:
        asking = asyncio.create_task(link.tally())
        await asyncio.sleep(0.01)
        async with serving(ipc, tmp_path) as server:
            assert await asking == Tally(), "asked before the server was there, and answered by it"
            await link.resume([])
            await link.register(new_episodes("a", "failed", "b", "c", "open"))
            link.cancel(["failed"], "enough groups")
            await link.flush()
            for _ in range(3):
                await server.end(await server.claim())
            outcomes = await collect(link, 4)
            await link.commit(consumed(outcomes))
            fetched = await link.fetch([outcomes[name].sequence for name in ("c", "failed", "a", "b")])
            assert [each.episode_uuid for each in fetched] == ["c", "a", "b"]
            assert [each.reward for each in fetched] == [1.0] * 3
            assert await link.tally() == Tally(train_accepted=3, planned_accepted=3, cancelled=1, lost=1)
            async with trainer(ipc) as successor:
                await successor.flush()
                with pytest.raises(LinkError, match="took over"):
                    await link.tally()


async def test_a_claim_that_its_client_never_got_is_handed_back(server: Server, link: TrainerLink) -> None:
    await link.register(new_episodes("e"))
    claiming = asyncio.create_task(server.claim("gone"))
    while server.book.get("e").state != "claimed":  # noqa: ASYNC110
        await asyncio.sleep(0)  # the commit that the claim waits for is a later step of the loop
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    assert server.book.get((await server.claim("next")).episode_uuid).failures[0].kind == "client_gone"


async def test_samples_are_answered_at_the_same_time(address: str, tmp_path: Path) -> None:
    both = asyncio.Barrier(2)

    async def sampler(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        await both.wait()
        return await scripted((7,)).sample(request)

    async with serving(address, tmp_path) as server, trainer(server.address, sampler):
        answers = await asyncio.gather(server.sampler.sample(REQUEST), server.sampler.sample(REQUEST))
    assert [answer.sequences[0].sampled for answer in answers] == [pack_ids([7])] * 2


@pytest.mark.parametrize(
    ("error", "status", "code", "text"),
    [
        (EngineError("out of memory"), 500, "engine_error", "out of memory"),
        (ValueError("bad top_p"), 400, "invalid_request", "bad top_p"),
        (GatewayError(403, "too_long", "9 tokens"), 403, "too_long", "9 tokens"),
        (KeyError("bug"), 500, "engine_error", "the engine raised KeyError"),
    ],
)
async def test_what_the_engine_raises_reaches_the_caller(
    ipc: str, tmp_path: Path, error: Exception, status: int, code: str, text: str
) -> None:
    async def sampler(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        raise error

    async with serving(ipc, tmp_path) as server, trainer(server.address, sampler):
        with pytest.raises(GatewayError) as caught:
            await server.sampler.sample(REQUEST)
    assert (caught.value.status, caught.value.code, caught.value.message) == (status, code, text)


async def test_a_sample_that_nobody_waits_for_is_cancelled(ipc: str, tmp_path: Path) -> None:
    hangs = WaitingSampler()
    async with serving(ipc, tmp_path) as server, trainer(server.address, hangs.sample):
        sampling = asyncio.create_task(server.sampler.sample(REQUEST))
        await hangs.started.wait()
        sampling.cancel()
        async with asyncio.timeout(10):
            await hangs.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await sampling


async def test_an_engine_that_does_not_answer_in_time(ipc: str, tmp_path: Path) -> None:
    hangs = WaitingSampler()
    async with serving(ipc, tmp_path, timeout_s=0.2) as server, trainer(server.address, hangs.sample):
        await until(lambda: server.link.connected)
        with pytest.raises(GatewayError, match=r"within 0\.2 s") as caught:
            await server.sampler.sample(REQUEST)
    assert caught.value.status == 504


async def test_a_sample_survives_the_death_of_its_trainer(ipc: str, tmp_path: Path) -> None:
    hangs = WaitingSampler()
    async with serving(ipc, tmp_path) as server:
        async with trainer(server.address, hangs.sample):
            sampling = asyncio.create_task(server.sampler.sample(REQUEST))
            await hangs.started.wait()
        async with trainer(server.address, scripted((9,)).sample):
            assert (await sampling).sequences[0].sampled == pack_ids([9])


async def test_a_sample_that_waits_for_the_trainer_of_a_former_server(ipc: str, tmp_path: Path) -> None:
    """The trainer drops what the former server asked for, and not what the new one asks for at once."""
    never_again = LinkTimes(heartbeat_s=0.05, silence_s=5, grace_s=5, resend_s=60)
    started = asyncio.Event()

    async def sampler(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        started.set()
        await both_are_there.wait()
        return await scripted((9,)).sample(request)

    both_are_there = asyncio.Event()
    async with trainer(ipc, sampler) as link:
        async with serving(ipc, tmp_path):
            await link.flush()
            first = link.server_id
        async with serving(ipc, tmp_path, times=never_again) as server:
            sampling = asyncio.create_task(server.sampler.sample(REQUEST))
            await until(lambda: link.server_id != first and started.is_set())
            await link.flush()
            both_are_there.set()
            assert (await sampling).sequences[0].sampled == pack_ids([9])


async def test_samples_are_refused_when_the_trainer_does_not_come_back(ipc: str, tmp_path: Path) -> None:
    hangs = WaitingSampler()
    async with serving(ipc, tmp_path) as server:
        async with trainer(server.address, hangs.sample):
            sampling = asyncio.create_task(server.sampler.sample(REQUEST))
            await hangs.started.wait()
        with pytest.raises(GatewayError, match="no trainer") as caught:
            await sampling
        assert (caught.value.status, caught.value.code) == (503, "engine_unavailable")
        assert server.interchange.engine.status == "ENGINE.OFFLINE"


async def test_a_trainer_that_started_earlier_does_not_take_over(ipc: str, tmp_path: Path) -> None:
    """Such as a frame of a dead trainer that arrives after its successor's."""
    async with serving(ipc, tmp_path) as server:
        old, new = trainer(server.address), trainer(server.address)
        async with new:
            await new.flush()
            async with old:
                with pytest.raises(LinkError, match="a trainer that started later"):
                    await old.flush()
            await new.register(new_episodes("e"))


async def test_the_newest_trainer_takes_over_and_the_old_one_learns_it(ipc: str, tmp_path: Path) -> None:
    async with serving(ipc, tmp_path) as server, trainer(server.address) as old:
        await old.register(new_episodes("e"))
        async with trainer(server.address) as new:
            await new.flush()
            with pytest.raises(LinkError, match="another trainer took over"):
                await old.outcomes()
            with pytest.raises(LinkError, match="took over"):
                await old.register(new_episodes("f"))
            await server.end(await server.claim())
            await new.resume([])
            assert set(await collect(new, 1)) == {"e"}


async def test_another_link_version_is_refused(ipc: str, tmp_path: Path) -> None:
    async with serving(ipc, tmp_path) as server, raw_trainer(server.address, "t") as socket:
        await socket.send(hello("t", link_version=LINK_VERSION + 1))
        answers = read_to_trainer((await socket.recv_multipart())[-1])
        assert isinstance(answers[0], Refused)
        assert f"link version {LINK_VERSION}" in answers[0].reason
        assert not server.link.connected


@asynccontextmanager
async def raw_trainer(address: str, identity: str) -> AsyncGenerator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        socket.connect(address)
        try:
            yield socket
        finally:
            socket.close(linger=0)


def hello(trainer_id: str, link_version: int = LINK_VERSION) -> bytes:
    message = Hello(
        link_version=link_version,
        trainer_id=trainer_id,
        policy_version=0,
        global_step=0,
        engine_status="ENGINE.ROLLING",
        model="m",
    )
    return next(frames([message]))


MALFORMED = [
    b"",
    b"junk",
    b"\xc1" * 40,
    msgspec.msgpack.encode({"type": "Hello"}),
    msgspec.msgpack.encode([{"type": "Nobody"}]),
    msgspec.msgpack.encode([{"type": "Register", "episodes": [{"episode_uuid": 1}]}]),
    msgspec.msgpack.encode([{"type": "Cancel", "episode_uuids": [b"\xff"], "reason": ""}]),
    b"\x91" * 100_000,
]


async def test_malformed_frames_are_counted_and_harm_nothing(address: str, tmp_path: Path) -> None:
    async with serving(address, tmp_path) as server:
        async with raw_trainer(server.address, "fuzzer") as socket:
            await socket.send(next(frames([Received(position=1)])))
            await until(lambda: server.drops("not_the_trainer"))
            for frame in MALFORMED:
                await socket.send(frame)
            await socket.send_multipart([b"two", b"parts"])
            await socket.send(hello("somebody else"))
            await until(lambda: server.drops("refused"))
            count = f'reason="malformed"}} {len(MALFORMED) + 1}.0'.encode()
            assert count in server.metrics.render()
            assert not server.link.connected
        async with trainer(server.address) as link:
            await link.register(new_episodes("e"))


async def test_malformed_frames_do_not_stop_the_trainer(ipc: str) -> None:
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.ROUTER)
        socket.bind(ipc)
        async with trainer(ipc) as link:
            identity, first = await socket.recv_multipart()
            assert isinstance(read_to_server(first)[0], Hello)
            for frame in MALFORMED:
                await socket.send_multipart([identity, frame])
            messages = [Resumed(request_id=1, history=History()), failed("e", number=1)]
            await socket.send_multipart([identity, next(frames(messages))])
            assert set(await collect(link, 1)) == {"e"}
        socket.close(linger=0)


def failed(uuid: str, number: int) -> EpisodeFailed:
    return EpisodeFailed(number=number, episode_uuid=uuid, failures=[])


def test_a_message_that_cannot_be_read_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    result = failed("neighbor", number=1)
    call = {"call_id": "c", "new_prompt": b"\0" * 4, "sampled": b"\0" * 8, "logprobs": b"\0" * 4}
    broken = {"type": "EpisodeAccepted", "episode_uuid": "victim", "calls": [call]}
    frame = msgspec.msgpack.encode([broken, result, {"type": "Nobody"}, result])
    assert read_to_trainer(frame) == [result, result]
    assert caplog.text.count("link.drop reason=malformed") == 2


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(frame: bytes) -> None:
    for read in (read_to_server, read_to_trainer):
        with contextlib.suppress(LinkError):
            assert isinstance(read(frame), list)


def test_full_frames_are_closed_and_keep_the_order() -> None:
    episodes = [new_episode(f"e{number}", payload=b'{"x": "%s"}' % (b"y" * 1_500_000)) for number in range(7)]
    messages = [Register(episodes=[episode]) for episode in episodes]
    sent = list(frames(messages))
    assert len(sent) == 3
    assert [message for frame in sent for message in read_to_server(frame)] == messages
    assert list(frames([])) == []


def test_a_message_too_large_is_dropped_alone_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkerscript.trainer_link.framing.MAX_MESSAGE_BYTES", 2000)
    messages: list[Tagged] = [Cancel(episode_uuids=[name], reason="x" * size) for name, size in SIZES.items()]
    messages.insert(1, CancelSample(request_id=2**70))
    dropped = list[tuple[str, str]]()
    sent = list(frames(messages, lambda reason, detail, _: dropped.append((reason, detail.split()[0]))))
    assert all(len(frame) < 2100 for frame in sent)
    read = [message for frame in sent for message in read_to_server(frame) if isinstance(message, Cancel)]
    assert [message.episode_uuids for message in read] == [["a"], ["b"], ["d"]]
    assert dropped == [("unencodable", "CancelSample:"), ("too_large", "Cancel")]


SIZES = {"a": 1500, "b": 1500, "c": 5000, "d": 10}
"""Episode -> length of the reason why it is cancelled."""


async def test_a_full_outbox_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkerscript.trainer_link.framing.MAX_QUEUED", 2)
    outbox = Outbox()
    for number in range(3):
        outbox.put(Sample(request_id=number, request=REQUEST))
    assert [getattr(message, "request_id", None) for message in await outbox.take()] == [1, 2]
    assert outbox.dropped == 1


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_payload_is_nested_no_deeper_than_json_parsers_go(opening: str, closing: str) -> None:
    allowed, deeper = (f"{opening * levels}1{closing * levels}" for levels in (63, 64))
    check_episode(new_episode(payload=f'{{"a":{allowed},"b":[[],[],{{}}]}}'.encode()))
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        check_episode(new_episode(payload=f'{{"a":{deeper}}}'.encode()))


def test_an_episode_of_an_unknown_type_cannot_be_registered() -> None:
    new = NewEpisode(episode_uuid="e", episode_type="train", group_id="", payload=b"{}")
    frame = next(frames([Register(episodes=[new])])).replace(b"train", b"other")
    with pytest.raises(LinkError, match="other"):
        read_to_server(frame)


async def test_a_cancellation_that_gets_lost_is_repeated(
    ipc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = losing_the_first(monkeypatch, Cancel)
    async with serving(ipc, tmp_path) as server, trainer(server.address) as link:
        await link.register(new_episodes("e"))
        link.cancel(["e"], "enough groups")
        await until(lambda: server.book.get("e").state == "failed", "the cancellation")
    assert len(lost) == 1


class HeldLedger(SqliteLedger):
    """Commits as many batches as it is allowed to."""

    free = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.allowed = asyncio.Semaphore(0)

    async def write(self, batch: WriteBatch) -> None:
        if not self.free:
            await self.allowed.acquire()
        await super().write(batch)

    def let_go(self) -> None:
        self.free = True
        self.allowed.release()


@pytest.mark.parametrize(("outcome", "commits"), [("ended", 0), ("failed", 0), ("failed", 1)])
async def test_an_outcome_is_sent_once_committed(
    ipc: str, tmp_path: Path, outcome: str, commits: int
) -> None:
    """A failure takes two commits: that it happened, and that it was offered and stands from now on."""
    async with serving(ipc, tmp_path, kind=HeldLedger) as server, trainer(server.address) as link:
        ledger = server.ledger
        assert isinstance(ledger, HeldLedger)
        await link.resume([])
        await link.register(new_episodes("e"))
        claim = await server.claim()
        await link.flush()
        ledger.free = False
        for _ in range(commits):
            ledger.allowed.release()
        if outcome == "failed":
            server.book.cancel("e", "enough groups")
        else:
            server.book.end("e", claim.attempt, reward=1.0, result=b'{"reward":1.0}')
        committing = asyncio.create_task(server.interchange.commit())
        for _ in range(2):  # A refusal waits for no commit: what was sent before it has arrived with it.
            with pytest.raises(ConflictError):
                await link.register([new_episode("e", payload=b"{}")])
        assert committing.done() == bool(commits)
        waiting = asyncio.create_task(link.outcomes())
        await asyncio.sleep(0)
        assert not waiting.done()
        ledger.let_go()
        await committing
        assert [each.episode_uuid for each in await waiting] == ["e"]


async def test_what_a_former_server_says_is_dropped(
    ipc: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A balancer that is late may lead the trainer back to it."""
    for name in "456":
        (tmp_path / name).mkdir()
    async with trainer(ipc) as link:
        async with serving(ipc, tmp_path / "5", epoch=5) as server:
            await link.flush()
        async with serving(ipc, tmp_path / "4", epoch=4) as former:
            await until(lambda: former.link.connected, "it hears the trainer")
            registering = asyncio.create_task(link.register(new_episodes("a")))
            former.link.send(Stop(reason="of long ago"))
            await until(lambda: "reason=former_server epoch=4" in caplog.text, "it is not believed")
            assert not registering.done()
            assert not link.stop_requested.is_set()
            assert link.server_id == server.link.server_id
        async with serving(ipc, tmp_path / "6", epoch=6) as server:
            await registering
            assert "a" in server.book
