"""Episodes run by clients: registered with, and delivered by, the interchange server over the link."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tinkerscript.protocol import WorkflowOutput
from tinkerscript.rollouts.call import Call
from tinkerscript.train.journal import EpisodeAccepted, EpisodeFailed, EpisodeRegistered, Outcome
from tinkerscript.train.sources.source import EpisodeSource, PlannedEpisode
from tinkerscript.trainer_link.messages import BatchProgress, NewEpisode, Result
from tinkerscript.trainer_link.messages import FailedEpisode as FailedMessage
from tinkerscript.trainer_link.trainer_end import TrainerLink


class NetworkSource(EpisodeSource):
    """Registers episodes over the link, and turns its messages into journal events."""

    def __init__(
        self, link: TrainerLink, *, group_size: int, client_samples: bool = True, has_workers: bool = False
    ) -> None:
        """`client_samples`: whether samples that clients register may train; `has_workers`: whether the
        trainer runs workers of its own, beside others'."""
        self._link = link
        if has_workers:
            self.own_clients = link.own_clients
        self._group_size = group_size
        self._failed_calls: dict[str, dict[int, list[Call]]] = {}
        self._transcripts: dict[str, dict[int, bytes]] = {}
        """Both of the outcomes that came last, by episode uuid."""

        link.set_status(client_samples=client_samples)

    async def start(self, episodes: Sequence[PlannedEpisode]) -> None:
        await self._link.register([_new_episode(episode, self._group_size) for episode in episodes])

    async def outcomes(self) -> list[Outcome]:
        messages = await self._link.outcomes()
        self._failed_calls = {m.episode_uuid: m.failed_calls for m in messages if m.failed_calls}
        self._transcripts = {m.episode_uuid: m.transcripts for m in messages if m.transcripts}
        return [outcome(message) for message in messages]

    def failed_calls(self, episode_uuid: str) -> Mapping[int, list[Call]]:
        return self._failed_calls.pop(episode_uuid, {})

    def transcripts(self, episode_uuid: str) -> Mapping[int, bytes]:
        return self._transcripts.pop(episode_uuid, {})

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._link.acknowledge([o.episode_uuid for o in outcomes])

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        if episode_uuids:
            self._link.cancel(episode_uuids, reason)

    async def lost(self, registered: Sequence[EpisodeRegistered]) -> list[EpisodeFailed]:
        recorded = await self._link.recorded_outcomes([event.episode_uuid for event in registered])
        archived = {uuid for uuid, outcome in recorded.items() if outcome.acknowledged}
        reason = "the server archived the outcome, but the journal no longer has it (power failure?)"
        failure: dict[str, object] = {"kind": "outcome_lost", "message": reason}
        return [
            EpisodeFailed(
                episode_uuid=event.episode_uuid,
                failures=[failure],
                episode_type=event.episode_type,
                group_id=event.group_id,
            )
            for event in registered
            if event.episode_uuid in archived
        ]

    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        """Episodes unknown to the server are registered first, so that they end in both records.

        No client can claim them meanwhile: the engine is still booting.
        """
        known = await self._link.recorded_outcomes([event.episode_uuid for event in registered])
        unknown = [
            NewEpisode(
                episode_uuid=event.episode_uuid,
                episode_type="eval" if event.episode_type == "eval" else "train",
                group_id=event.group_id,
                payload=b"{}",
            )
            for event in registered
            if event.episode_uuid not in known
        ]
        await self._link.register(unknown)
        self.cancel([event.episode_uuid for event in registered], reason)

    async def flush(self) -> None:
        await self._link.flush()

    def accepts(self, policy_versions: Sequence[int]) -> None:
        self._link.set_status(usable_versions=list(policy_versions))

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        self._link.set_batch(batch, at_once=at_once)

    def publishing(self) -> None:
        self._link.set_status(engine_status="ENGINE.WEIGHT_SYNCING")

    async def publish(self, policy_version: int, global_step: int) -> None:
        self._link.set_status(
            policy_version=policy_version, global_step=global_step, engine_status="ENGINE.ROLLING"
        )


def _new_episode(episode: PlannedEpisode, group_size: int) -> NewEpisode:
    return NewEpisode(
        episode_uuid=episode.episode_uuid,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
        payload=msgspec.json.encode(episode.payload),
        group_size=group_size,
    )


def outcome(message: Result | FailedMessage) -> Outcome:
    """A link message as a journal event."""
    failures: list[dict[str, Any]] = json.loads(message.failures)
    if isinstance(message, FailedMessage):
        return EpisodeFailed(
            episode_uuid=message.episode_uuid,
            failures=failures,
            episode_type=message.episode_type,
            pool=message.pool,
            group_id=message.group_id,
            group_size=message.group_size,
        )
    output = WorkflowOutput.model_validate_json(message.workflow_output)
    return EpisodeAccepted(
        episode_uuid=message.episode_uuid,
        attempt=message.attempt,
        client_uuid=message.client_uuid,
        reward=message.reward,
        policy_version_at_claim=message.policy_version_at_claim,
        all_calls=message.calls,
        role_rewards=output.role_rewards,
        metadata=dict(output.metadata),
        log_metrics=output.log_metrics,
        is_success=output.is_success,
        retries=failures,
        episode_type=message.episode_type,
        pool=message.pool,
        group_id=message.group_id,
        group_size=message.group_size,
    )
