"""What becomes of a trainer's episodes when the next trainer resumes the run, against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from interchange_helpers import collect, consumed, trainer
from interchange_setup import Setup
from tinkerscript.addresses import read_server_info
from tinkerscript.ledger.rows import StepRow, TrainedRow, Use
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.trainer_link.messages import EpisodeAccepted
from tinkerscript.trainer_link.trainer_end import TrainerLink


def planned(*names: str, group: str = "g") -> list[PlannedEpisode]:
    return [
        PlannedEpisode("train", group, {"sample": {"input": name}}, position=place, episode_uuid=name)
        for place, name in enumerate(names)
    ]


def address_of(setup: Setup) -> str:
    info = read_server_info(setup.run_dir)
    assert info is not None
    return info.link_address


@pytest.fixture
async def successor(setup: Setup) -> AsyncIterator[TrainerLink]:
    """The next trainer, once the first one is gone."""
    source = EpisodeSource(setup.link, group_size=2)
    await source.start(planned("a", "b"), step=1)
    await source.start(planned("c", "d", group="h"), step=2)
    await source.start([PlannedEpisode("eval", "v", {}, episode_uuid="v")], step=0)
    async with trainer(address_of(setup)) as link:
        yield link


async def test_what_no_step_can_use_is_given_up_also_while_it_is_claimed(
    setup: Setup, successor: TrainerLink
) -> None:
    kinds = [*["train"] * 4, "eval"]
    claims = [await setup.claim(episode_type=kind) for kind in kinds]
    await setup.end(claims[2])
    history = await successor.resume([])
    assert [(each.episode_uuid, each.group_id, each.position) for each in history.planned] == [
        ("a", "g", 0),
        ("b", "g", 1),
    ]
    assert (history.planned_groups, history.next_position) == (1, 2)
    for claim in claims[3:]:
        refused = await setup.call(claim.openai_api_key)
        assert refused.status_code == 409
        assert "the run was resumed" in refused.text
    for claim in claims[:2]:
        assert (await setup.call(claim.openai_api_key)).status_code == 200
        await setup.end(claim)
    found = await collect(successor, 2)
    assert [*found] == ["a", "b"]
    assert all(isinstance(each, EpisodeAccepted) for each in found.values())
    assert (await successor.tally()).cancelled == 2


async def test_what_an_undone_step_trained_on_comes_again(setup: Setup, successor: TrainerLink) -> None:
    for _ in "ab":
        await setup.end(await setup.claim(episode_type="train"))
    await successor.resume([])
    found = await collect(successor, 2)
    step = StepRow(step=1, time=1.0, policy_version=1)
    judged = TrainedRow(episode=1, step=1, role="judge", outcome=Use.TRAINED)
    await successor.commit([step, *consumed(found), judged])
    async with trainer(address_of(setup)) as third:
        history = await third.resume([])
        assert [each.episode_uuid for each in history.planned] == ["a", "b"]
        again = await collect(third, 2)
        assert [*again] == ["a", "b"]
        await third.commit([step, *consumed(again)])
        assert (await third.tally()).lost == 0
