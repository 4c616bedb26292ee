"""What a resumed trainer does about the episodes of the one before it, against a real server."""

from __future__ import annotations

from interchange_helpers import eventually, new_episodes
from interchange_setup import OUTPUT, Setup
from tinkerscript.train.episode_source import NetworkSource
from tinkerscript.train.journal import EpisodeRegistered
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome, RecordedOutcome


def source_of(setup: Setup) -> NetworkSource:
    return NetworkSource(setup.link, group_size=2)


def registered(*names: str) -> list[EpisodeRegistered]:
    return [EpisodeRegistered(episode_uuid=name, group_id="g", episode_type="train") for name in names]


async def outcomes(source: NetworkSource, *names: str) -> dict[str, Outcome]:
    found = dict[str, Outcome]()

    async def all_there() -> bool:
        found.update({outcome.episode_uuid: outcome for outcome in await source.outcomes()})
        return found.keys() >= set(names)

    await eventually(all_there)
    return found


def kinds(outcome: Outcome) -> list[object]:
    assert isinstance(outcome, EpisodeFailed)
    return [failure["kind"] for failure in outcome.failures]


async def test_what_was_given_up_ends_in_both_books_even_if_the_server_never_heard_of_it(
    setup: Setup,
) -> None:
    source = source_of(setup)
    await setup.link.register(new_episodes("claimed", "waiting"))
    claim = await setup.claim()
    await source.abandon(registered("claimed", "waiting", "unheard"), "the run was resumed")
    ended = await outcomes(source, "claimed", "waiting", "unheard")
    assert {name: kinds(outcome) for name, outcome in ended.items()} == {
        name: ["cancelled"] for name in ("claimed", "waiting", "unheard")
    }
    refused = await setup.call(claim.openai_api_key)
    assert refused.status_code == 409
    assert "the run was resumed" in refused.text


async def test_a_result_that_was_there_before_it_was_given_up_is_delivered(setup: Setup) -> None:
    source = source_of(setup)
    await setup.link.register(new_episodes("done"))
    claim = await setup.claim()
    body = {"client_uuid": "c", "episode_uuid": "done", "attempt": claim.attempt, "workflow_output": OUTPUT}
    await setup.post("/end_episode", **body)
    await source.abandon(registered("done"), "the run was resumed")
    done = (await outcomes(source, "done"))["done"]
    assert isinstance(done, EpisodeAccepted)
    assert (done.reward, done.client_uuid, done.attempt) == (OUTPUT["reward"], "c", 1)
    assert done.metadata == OUTPUT["metadata"]
    source.acknowledge([done])
    assert await setup.link.recorded_outcomes(["done"]) == {"done": RecordedOutcome("accepted", True)}


async def test_an_outcome_that_the_journal_lost_after_it_was_acknowledged_is_a_failure(setup: Setup) -> None:
    source = source_of(setup)
    await setup.link.register(new_episodes("archived", "open"))
    claim = await setup.claim()
    body = {"client_uuid": "c", "episode_uuid": "archived", "attempt": claim.attempt}
    await setup.post("/end_episode", **body, workflow_output=OUTPUT)
    source.acknowledge([(await outcomes(source, "archived"))["archived"]])
    await source.flush()
    (lost,) = await source.lost(registered("archived", "open", "unheard"))
    assert lost.episode_uuid == "archived"
    assert kinds(lost) == ["outcome_lost"]
    assert not await source.lost(registered("open"))
