"""What becomes of a trainer's episodes when the next trainer resumes the run, against a real server."""

from __future__ import annotations

from interchange_helpers import collect, trainer
from interchange_setup import Setup
from tinkerscript.addresses import read_server_info
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.trainer_link.messages import EpisodeAccepted


def planned(*names: str, group: str = "g") -> list[PlannedEpisode]:
    return [
        PlannedEpisode("train", group, {"sample": {"input": name}}, position=place, episode_uuid=name)
        for place, name in enumerate(names)
    ]


async def test_what_no_step_can_use_is_given_up_also_while_it_is_claimed(setup: Setup) -> None:
    source = EpisodeSource(setup.link, group_size=2)
    await source.start(planned("a", "b"), step=1)
    await source.start(planned("c", "d", group="h"), step=2)
    await source.start([PlannedEpisode("eval", "v", {}, episode_uuid="v")], step=0)
    kinds = [*["train"] * 4, "eval"]
    claims = [await setup.claim(episode_type=kind) for kind in kinds]
    await setup.end(claims[2])
    info = read_server_info(setup.run_dir)
    assert info is not None
    async with trainer(info.link_address) as successor:
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
