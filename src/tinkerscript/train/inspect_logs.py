from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from inspect_ai.log import EvalSample
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ModelOutput
from inspect_ai.scorer import Score

from inspect_tinker_bridge import SavedRollout, UnsupportedError, write_inspect_log
from inspect_tinker_bridge.conversion import from_dicts
from inspect_tinker_bridge.episodes import MODEL_NAME
from tinkerscript.rollouts.advantages import PLAIN, AdvantageRule, RolloutGroup
from tinkerscript.rollouts.call import conversation_of, full_prompts, unpack_ids
from tinkerscript.trainer_link.messages import EpisodeAccepted

FOLDER = "inspect"

# Inspect's writer is not thread-safe.
_WRITING = threading.Lock()


def write_logs(
    folder: Path,
    label: str,
    step: int,
    groups: Sequence[RolloutGroup],
    outcomes: Sequence[EpisodeAccepted],
    samples: Mapping[str, Mapping[str, Any]],
    *,
    rule: AdvantageRule = PLAIN,
) -> list[Path]:
    """Write one log per task, replacing logs with the same `label`. Blocks. `samples`: uuid -> payload."""
    advantages = {
        episode.episode_uuid: advantage
        for group in groups
        for episode, advantage in zip(group.episodes, group.advantages(rule).tolist(), strict=True)
    }
    by_task: dict[str, list[SavedRollout]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.group_id):
        payload = samples.get(outcome.episode_uuid, {})
        task = str(payload.get("task", "episodes"))
        saved = _saved(task, step, outcome, payload.get("sample") or {}, advantages.get(outcome.episode_uuid))
        by_task.setdefault(task, []).append(saved)
    (folder / FOLDER).mkdir(exist_ok=True)
    former = list((folder / FOLDER).glob(f"*-{label}_*.eval"))
    paths = [folder / FOLDER / _name(task, label) for task in by_task]
    for path, rollouts in zip(paths, by_task.values(), strict=True):
        with _WRITING:
            write_inspect_log(path, rollouts)
    for path in former:
        path.unlink()
    return paths


def _saved(
    task: str, step: int, outcome: EpisodeAccepted, sample: Mapping[str, Any], advantage: float | None
) -> SavedRollout:
    metadata: dict[str, Any] = {
        **(sample.get("metadata") or {}),
        "training": {
            "episode_uuid": outcome.episode_uuid,
            "group_id": outcome.group_id,
            "advantage": advantage,
            "policy_versions": sorted({v for call in outcome.calls for v in call.policy_versions}),
            "logprobs": [call.sampled_logprobs.tolist() for call in outcome.calls],
            "log_metrics": outcome.log_metrics,
            "metadata": outcome.metadata,
        },
    }
    messages: list[ChatMessage] = []
    try:
        messages = from_dicts(conversation_of(outcome.calls))
    except UnsupportedError as error:
        metadata["not_shown"] = str(error)
    said = [message for message in messages if isinstance(message, ChatMessageAssistant)]
    record = EvalSample(
        id=sample.get("id") or outcome.group_id,
        epoch=1,
        input=sample.get("input") or _asked(messages),
        target=sample.get("target") or "",
        messages=messages,
        output=ModelOutput.from_message(said[-1]) if said else ModelOutput(model=MODEL_NAME),
        scores=_scores(outcome),
        metadata=metadata,
    )
    prompts = full_prompts(outcome.calls)
    turns = [(unpack_ids(prompts[c.call_id]).tolist(), c.sampled_ids.tolist()) for c in outcome.calls]
    return SavedRollout(task, step, record, outcome.reward, turns)


def _asked(messages: Sequence[ChatMessage]) -> str:
    return next((message.text for message in messages if message.role == "user"), "")


def _scores(outcome: EpisodeAccepted) -> dict[str, Score]:
    # Scripts may use these metadata names for other data, which is skipped.
    values = {
        name: value
        for name, value in _mapping(outcome.metadata.get("scores")).items()
        if isinstance(value, int | float)
    }
    scores: dict[str, Score] = {}
    for name, words in _mapping(outcome.metadata.get("explanations")).items():
        if not isinstance(words, dict):
            continue
        said = {key: text for key, text in _mapping(words).items() if isinstance(text, str)}
        parts: dict[str, str | int | float | bool | None] = {
            key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")
        }
        scores[name] = Score(
            value=values.get(name, parts),
            answer=said.get("answer"),
            explanation=said.get("explanation"),
        )
    return scores or {"reward": Score(value=outcome.reward)}


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _name(task: str, label: str) -> str:
    plain = "".join(letter if letter.isalnum() else "-" for letter in task.rpartition("@")[2])
    return f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}_{plain}-{label}_{uuid4().hex[:12]}.eval"
