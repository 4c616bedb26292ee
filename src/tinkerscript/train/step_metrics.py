"""A training step's metrics (`STEP_METRICS`), and where they go (`metric_loggers`).

A metric is a function of `StepFacts`, from the table or from `metrics.extra`.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.utils.ml_log import Logger, TrackioLogger, WandbLogger

from tinkerscript.config import RunConfig, import_name
from tinkerscript.errors import ConfigError
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import Call
from tinkerscript.trainer_link.messages import JUDGE_FAILED, EpisodeAccepted, EpisodeFailed, Outcome

if TYPE_CHECKING:  # Imports torch and Inspect, which would load before the config is valid.
    from tinkerscript.train.collector import Batch


__all__ = ["STEP_METRICS", "StepFacts", "StepMetric"]

# Metrics of a step


Differs = Callable[[RolloutGroup], bool]
"""Whether a group's rewards, or its calls', differ."""


def rewards_differ(group: RolloutGroup) -> bool:
    return group.rewards_differ


@dataclass(frozen=True, slots=True)
class StepFacts:
    batch: Batch
    groups: Sequence[RolloutGroup]
    lags: Mapping[int | None, int]
    """Policy lag -> episodes. None: from undone weights."""

    stale: Collection[str]
    policy_version: int
    cancelled: int
    tasks: Sequence[str]
    task_of: Mapping[str, str]
    rollout_s: float
    train_s: float
    publish_s: float = 0.0
    wait_stale_s: float | None = None
    """The part of `rollout_s` spent on groups that would have been too old later."""

    sampling_share: float | None = None
    trains_equal: bool = False
    differs: Differs = rewards_differ

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self.batch.outcomes.values())

    @property
    def accepted(self) -> list[EpisodeAccepted]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, EpisodeAccepted)]


StepMetric = Callable[[StepFacts], Mapping[str, float]]


def reward(facts: StepFacts) -> dict[str, float]:
    rewards = [outcome.reward for outcome in facts.accepted]
    told = [outcome.is_success for outcome in facts.accepted if outcome.is_success is not None]
    return {
        **spread(rewards),
        **({"success/rate": sum(told) / len(told)} if told else {}),
        **by_task(facts.outcomes, facts.task_of, "reward", tasks=facts.tasks),
    }


def spread(rewards: Sequence[float]) -> dict[str, float]:
    if not rewards:
        return {}
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return {
        "reward/mean": mean,
        "reward/deviation": deviation,
        "reward/lowest": min(rewards),
        "reward/highest": max(rewards),
    }


def judge(facts: StepFacts) -> dict[str, float]:
    failed = [each for each in facts.outcomes if isinstance(each, EpisodeFailed)]
    groups = {each.group_id for each in failed if each.failures and each.failures[-1]["kind"] == JUDGE_FAILED}
    return {"judge/failed_groups": float(len(groups))} if groups else {}


def lengths(facts: StepFacts) -> dict[str, float]:
    """Prompts count in full."""
    return call_lengths([outcome.calls for outcome in facts.accepted])


def call_lengths(episodes: Sequence[Sequence[Call]]) -> dict[str, float]:
    prompts: list[int] = []
    replies: list[int] = []
    cut = 0
    for calls in episodes:
        ends: dict[str, int] = {}
        for call in calls:
            prompt = ends.get(call.parent_id or "", 0) + len(call.new_prompt) // 4
            reply = len(call.sampled) // 4
            ends[call.call_id] = prompt + reply
            prompts.append(prompt)
            replies.append(reply)
            cut += call.stop_reason == "length"
    if not replies:
        return {}
    return {
        "prompt_tokens/mean": sum(prompts) / len(prompts),
        "prompt_tokens/max": float(max(prompts)),
        "response_tokens/mean": sum(replies) / len(replies),
        "response_tokens/max": float(max(replies)),
        "response_tokens/cut_off": cut / len(replies),
        "episode_tokens/mean": sum(replies) / len(episodes),
        "turns/mean": len(replies) / len(episodes),
        "turns/max": float(max(map(len, episodes))),
    }


def episodes(facts: StepFacts) -> dict[str, float]:
    accepted = facts.accepted
    used = [each for group in facts.groups for each in group.episodes if each.episode_uuid not in facts.stale]
    return {
        "episodes/accepted": float(len(accepted)),
        "episodes/failed": float(len(facts.outcomes) - len(accepted)),
        "episodes/retried": float(sum(bool(outcome.retries) for outcome in accepted)),
        "episodes/stale": float(len(facts.stale)),
        "episodes/used": float(len(used)),
        "episodes/cancelled": float(facts.cancelled),
    }


def groups(facts: StepFacts) -> dict[str, float]:
    dropped = len(facts.batch.groups) - len(facts.groups)
    trained = trained_groups(facts.groups, facts.trains_equal, facts.differs)
    return trained | {"groups/dropped": float(dropped)}


def trained_groups(groups: Sequence[RolloutGroup], trains_equal: bool, differs: Differs) -> dict[str, float]:
    equal = [] if trains_equal else [each.rewards[0] for each in groups if not differs(each)]
    return {
        "groups/trained": float(len(groups) - len(equal)),
        "groups/same_reward": float(len(equal)),
        **({"groups/same_reward_mean": sum(equal) / len(equal)} if equal else {}),
    }


def policy(facts: StepFacts) -> dict[str, float]:
    lags = {f"lag/{'gone' if lag is None else lag}": float(n) for lag, n in facts.lags.items()}
    return {"policy_version": float(facts.policy_version), **lags}


def timing(facts: StepFacts) -> dict[str, float]:
    waited = {} if facts.wait_stale_s is None else {"time/wait_stale_s": facts.wait_stale_s}
    if facts.sampling_share is not None:
        waited["time/sample_s"] = facts.sampling_share * (facts.rollout_s - (facts.wait_stale_s or 0.0))
    return {
        **waited,
        "time/rollout_s": facts.rollout_s,
        "time/train_s": facts.train_s,
        "time/publish_s": facts.publish_s,
        "episodes_per_s": len(facts.outcomes) / (facts.rollout_s + facts.train_s),
    }


def system(facts: StepFacts) -> dict[str, float]:
    del facts
    found = {"system/load": os.getloadavg()[0]}
    with suppress(OSError):
        sizes = {
            line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()
        }
        found["system/memory_gb"] = (int(sizes["MemTotal"]) - int(sizes["MemAvailable"])) * 1024 / 1e9
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["system/trainer_gb"] = pages * resource.getpagesize() / 1e9
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found["system/gpu_memory_gb"] = (total - free) / 1e9
        with suppress(Exception):  # Needs nvidia-ml-py, and fails on some devices (MIG).
            found["system/gpu_load"] = torch.cuda.utilization() / 100
    return found


def reported(facts: StepFacts) -> dict[str, float]:
    """Means of `log_metrics`, as `episode/<metric>`, over the episodes that report them. Totals of
    `limit/<kind>`, `tool_error/<kind>` and `failure/<kind>`.
    """
    values: dict[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for outcome in facts.outcomes:
        if isinstance(outcome, EpisodeFailed):
            kind = outcome.failures[-1].get("kind") if outcome.failures else None
            counts[f"failure/{kind or 'unknown'}"] += 1
            continue
        for name, value in outcome.log_metrics.items():
            values[name].append(value)
    metrics = {name: float(number) for name, number in counts.items()}
    for name, found in values.items():
        if name.startswith(("limit/", "tool_error/")):  # Not reported where 0, so no mean.
            metrics[name] = sum(found)
        else:
            metrics[f"episode/{name}"] = sum(found) / len(found)
    return metrics


def role_metrics(
    role: str,
    groups: Sequence[RolloutGroup],
    learned: Mapping[str, float],
    alignment: Mapping[str, float],
    *,
    trains_equal: bool,
    differs: Differs = rewards_differ,
) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group.episodes]
    found = {
        **learned,
        **spread([episode.reward for episode in episodes]),
        **call_lengths([episode.calls for episode in episodes]),
        **trained_groups(groups, trains_equal, differs),
        **alignment,
    }
    return {f"role/{role}/{name}": value for name, value in found.items()}


STEP_METRICS: list[StepMetric] = [reward, judge, lengths, episodes, groups, policy, timing, system, reported]


def step_metrics(facts: StepFacts) -> dict[str, float]:
    return {name: value for metric in STEP_METRICS for name, value in metric(facts).items()}


def extra_metrics(config: RunConfig) -> list[StepMetric]:
    return [cast(StepMetric, import_name(name, what="metrics.extra")) for name in config.metrics.extra]


def by_task(
    outcomes: Iterable[Outcome], task_of: Mapping[str, str], name: str, *, tasks: Sequence[str]
) -> dict[str, float]:
    """Mean rewards as `<name>/<task>`. Empty for a single task."""
    if len(tasks) < 2:
        return {}
    rewards: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if isinstance(outcome, EpisodeAccepted) and outcome.episode_uuid in task_of:
            rewards[task_of[outcome.episode_uuid]].append(outcome.reward)
    return {f"{name}/{task}": sum(found) / len(found) for task, found in rewards.items()}


def why_nothing_trained(
    facts: StepFacts, metrics: Mapping[str, float], errors: Mapping[str, int] | None = None
) -> str:
    """Return "" if it trained. `errors`: name -> count."""
    if metrics["train/sequences"]:
        return ""
    if not facts.groups:
        counts = {name: int(value) for name, value in episodes(facts).items()}
        return (
            "no group has enough episodes that can train "
            f"({counts['episodes/accepted']} accepted, {counts['episodes/failed']} failed, "
            f"{counts['episodes/stale']} stale)"
        )
    return why_groups_do_not_train(
        facts.groups, trains_equal=facts.trains_equal, errors=errors, differs=facts.differs
    )


def why_groups_do_not_train(
    groups: Sequence[RolloutGroup],
    *,
    trains_equal: bool = False,
    errors: Mapping[str, int] | None = None,
    differs: Differs = rewards_differ,
) -> str:
    if not groups:
        return "no group has enough episodes that can train"
    if not trains_equal and not any(map(differs, groups)):
        rewards = sorted({episode.reward for group in groups for episode in group.episodes})
        values = f"all are {rewards[0]:g}" if len(rewards) == 1 else f"{rewards[0]:g} to {rewards[-1]:g}"
        return (
            f"in each of the {len(groups)} groups all rewards are equal ({values}), and advantages "
            "come from differences within a group"
        )
    differing = [group for group in groups if trains_equal or differs(group)]
    if not any(episode.rollouts for group in differing for episode in group.episodes):
        return "no episode of the groups with differing rewards called the model: nothing to train on"
    found = ", ".join(f"{number} {name}" for name, number in (errors or {}).items())
    sequences = [each for group in differing for episode in group.episodes for each in episode.rollouts]
    if not found and all(each.is_truncated for each in sequences):
        return "the token limit cut off every reply, and training.mask_truncated trains none of these"
    return f"the alignment check left out every sequence: {found or 'alignment.json says why'}"


# Where they go


class TensorBoardLogger(Logger):
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._open: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._config = config
        self._writer: Any = None

    def log_hparams(self, config: Any) -> None:
        self._config = config

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """A resumed run's steps replace the old ones."""
        if self._writer is None:
            self._writer = self._open(log_dir=str(self._folder), purge_step=step)
            lines = (f"| {section} | {values} |" for section, values in self._config.items())
            table = "\n".join(["| section | values |", "|---|---|", *lines])
            self._writer.add_text("config", table, global_step=step)
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class LateWandbLogger(WandbLogger):
    """W&B drops late metrics, so they get the newest step, and the true one in `eval/step`."""

    _newest = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if step is not None and step < self._newest:
            metrics = {**metrics, "eval/step": float(step)}
        self._newest = max(self._newest, step or 0)
        super().log_metrics(metrics, self._newest)


def metric_loggers(config: RunConfig, folder: Path) -> list[Logger]:
    values, project = config.model_dump(mode="json"), config.metrics.project
    makers: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoardLogger(folder / "tensorboard", values),
        "wandb": lambda: LateWandbLogger(project, values, folder, wandb_name=folder.name),
        "trackio": lambda: TrackioLogger(project, values, trackio_name=folder.name),
    }
    return [_made(name, makers[name]) for name in config.metrics.loggers]


def _made(name: str, make: Callable[[], Logger]) -> Logger:
    try:
        importlib.import_module(name)
        return make()
    except ImportError as error:
        raise ConfigError(
            f"metrics.loggers: {name} cannot be imported ({error}): pip install 'tinkerscript[{name}]'"
        ) from error
    except TinkerCookbookError as error:
        raise ConfigError(f"metrics.loggers: {name}: {error}") from error


PUSH_S = 5.0

MAX_NAMES = 256

# Names with these prefixes are the clients', without limit.
REPORTED = ("episode/", "limit/", "tool_error/", "failure/")


class ReplicaFigures(Protocol):
    name: str
    serving: bool
    pinned: int
    tokens: float

    @property
    def load(self) -> tuple[int, int]: ...


class TrainerMetrics(Logger):
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(namespace="tinkerscript_trainer", registry=self._registry)
        self._step = Gauge("tinkerscript_trainer_step", "Last finished step.", registry=self._registry)
        self._values = Gauge(
            "tinkerscript_trainer_metric",
            "A metric of the last finished step or evaluation, as in metrics.jsonl.",
            ["metric"],
            registry=self._registry,
        )
        self._newest = 0
        self._names = set[str]()
        self._replicas = _Replicas()
        self._registry.register(self._replicas)

    def log_hparams(self, config: Any) -> None:
        """The run folder has the config."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is not None:
            self._newest = max(self._newest, step)
            self._step.set(self._newest)
        for name, value in metrics.items():
            if name.startswith(REPORTED) or (name not in self._names and len(self._names) >= MAX_NAMES):
                continue
            self._names.add(name)
            self._values.labels(name).set(value)

    def watch(self, replicas: Iterable[ReplicaFigures]) -> None:
        self._replicas.replicas = list(replicas)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    async def push(self, send: Callable[[bytes], object]) -> None:
        while True:
            send(self.text())
            await asyncio.sleep(PUSH_S)


class _Replicas(Collector):
    def __init__(self) -> None:
        self.replicas: list[ReplicaFigures] = []

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "serving": "Whether the replica samples for the run.",
            "calls_in_flight": "Model calls that wait for the replica.",
            "episodes": "Episodes that stay with the replica.",
        }
        families = [
            GaugeMetricFamily(f"tinkerscript_replica_{name}", text, labels=["replica"])
            for name, text in gauges.items()
        ]
        tokens = CounterMetricFamily(
            "tinkerscript_replica_sampled_tokens", "Tokens that the replica has sampled.", labels=["replica"]
        )
        for replica in self.replicas:
            for family, value in zip(
                families, (replica.serving, replica.load[0], replica.pinned), strict=True
            ):
                family.add_metric([replica.name], float(value))
            tokens.add_metric([replica.name], replica.tokens)
        return iter([*families, tokens])
