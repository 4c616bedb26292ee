"""Episodes run by clients: registered with, and delivered by, the interchange server over the link."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from tinkerscript.protocol import WorkflowOutput
from tinkerscript.server.messages import EpisodeFailed as FailedMessage
from tinkerscript.server.messages import NewEpisode, Result
from tinkerscript.server.trainer_link import TrainerLink
from tinkerscript.train.journal import EpisodeAccepted, EpisodeFailed, Outcome
from tinkerscript.train.source import EpisodeSource, PlannedEpisode


class NetworkSource(EpisodeSource):
    """Waits for the outcomes of exactly the episodes it registered, by id."""

    def __init__(self, link: TrainerLink) -> None:
        self._link = link

    async def run(self, episodes: Sequence[PlannedEpisode]) -> AsyncIterator[list[Outcome]]:
        waiting = {episode.episode_uuid for episode in episodes}
        await self._link.register([_new_episode(episode) for episode in episodes])
        while waiting:
            messages = await self._link.outcomes()
            outcomes = [outcome(message) for message in messages]
            # A result that is delivered again was journalled before: acknowledge it once more.
            again = [o for o in outcomes if o.episode_uuid not in waiting]
            self.acknowledge(again)
            fresh = {o.episode_uuid: o for o in outcomes if o.episode_uuid in waiting}
            waiting -= fresh.keys()
            if fresh:
                yield list(fresh.values())

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._link.acknowledge([o.episode_uuid for o in outcomes])

    async def flush(self) -> None:
        await self._link.flush()

    async def publish(self, policy_version: int, global_step: int) -> None:
        self._link.set_status(
            policy_version=policy_version, global_step=global_step, engine_status="ENGINE.ROLLING"
        )


def _new_episode(episode: PlannedEpisode) -> NewEpisode:
    return NewEpisode(
        episode_uuid=episode.episode_uuid,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
        payload=msgspec.json.encode(episode.payload),
    )


def outcome(message: Result | FailedMessage) -> Outcome:
    """A message of the link as an event of the journal."""
    failures: list[dict[str, Any]] = json.loads(message.failures)
    if isinstance(message, FailedMessage):
        return EpisodeFailed(episode_uuid=message.episode_uuid, failures=failures)
    output = WorkflowOutput.model_validate_json(message.workflow_output)
    return EpisodeAccepted(
        episode_uuid=message.episode_uuid,
        attempt=message.attempt,
        client_uuid=message.client_uuid,
        reward=message.reward,
        policy_version_at_claim=message.policy_version_at_claim,
        calls=message.calls,
        metadata=dict(output.metadata),
        log_metrics=output.log_metrics,
        retries=failures,
    )
