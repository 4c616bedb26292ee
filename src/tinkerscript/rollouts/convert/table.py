"""Groups of rollouts <-> Arrow tables, Parquet files and Hugging Face datasets: one row per sequence.

Invariants: what is written reads back equal, including groups, rewards, metadata and calls; a file that is
there is complete. An episode without a sequence has one row without tokens, since its reward counts in its
group. A call's ids and logprobs are stored only once, as part of its row; a rollout whose calls disagree with
it is refused.

Needs `tinkerscript[datasets]`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tinkerscript.errors import MAX_REWARD, ConversionError
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import Call
from tinkerscript.rollouts.convert.traits import TRAITS, check_episode_carried
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout, Segment

ROWS_PER_GROUP = 1024
"""Sequences per Parquet row group, which is what a writer and a reader hold in memory."""

_IDS = ("new_prompt", "sampled", "logprobs")
"""Fields of a call that are slices of its row."""

Row = Mapping[str, Any]


def write_parquet(path: str | Path, groups: Iterable[RolloutGroup]) -> int:
    """Write groups to a Parquet file, `ROWS_PER_GROUP` sequences at a time. Returns the number of rows.

    Raises ConversionError for a rollout that must not train or would not read back equal. Whatever ends the
    writing, a file that was there before is untouched.
    """
    schema = _schema()
    number = 0
    with (
        _replacing(Path(path)) as draft,
        _parquet().ParquetWriter(draft, schema, compression="zstd") as writer,
    ):
        for part in _parts(_rows(groups), ROWS_PER_GROUP):
            writer.write_table(_arrow().Table.from_pylist(part, schema=schema))
            number += len(part)
    return number


@contextmanager
def _replacing(path: Path) -> Generator[Path]:
    """A draft beside `path`, which takes its place unless the body raises."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_parquet(path: str | Path) -> Iterator[RolloutGroup]:
    """Read the groups of a `write_parquet` file in order, with about one row group in memory.

    Raises ConversionError for a file with different columns.
    """
    with _parquet().ParquetFile(path) as file:
        parts = (file.read_row_group(number) for number in range(file.num_row_groups))
        yield from _groups(row for part in parts for row in _checked(part))


def to_dataset(groups: Iterable[RolloutGroup]) -> Any:
    """Convert groups to a `datasets.Dataset`. Raises ConversionError."""
    datasets = _datasets()
    table = to_table(groups)
    return datasets.Dataset.from_dict(
        table.to_pydict(), features=datasets.Features.from_arrow_schema(table.schema)
    )


def from_dataset(dataset: Any) -> list[RolloutGroup]:
    """Convert a dataset made by `to_dataset`, or a selection of its rows, back to groups."""
    return from_table(dataset.with_format("arrow")[:])


def to_table(groups: Iterable[RolloutGroup]) -> Any:
    """Convert groups to a `pyarrow.Table`. Raises ConversionError for a rollout that must not train or would
    not read back equal."""
    return _arrow().Table.from_pylist(list(_rows(groups)), schema=_schema())


def from_table(table: Any) -> list[RolloutGroup]:
    """Convert a table made by `to_table` back to groups. Raises ConversionError for missing columns."""
    return list(_groups(_checked(table)))


def _checked(table: Any) -> list[Row]:
    missing = [name for name in _schema().names if name not in table.column_names]
    if missing:
        raise ConversionError(f"not a table of rollouts: it has no column {', '.join(missing)}")
    return table.to_pylist()


def _arrow() -> Any:
    with _naming_the_extra():
        import pyarrow  # noqa: PLC0415 (optional dependency)
    return pyarrow


def _parquet() -> Any:
    with _naming_the_extra():
        from pyarrow import parquet  # noqa: PLC0415 (optional dependency)
    return parquet


def _datasets() -> Any:
    with _naming_the_extra():
        import datasets  # noqa: PLC0415 (optional dependency)
    return datasets


@contextmanager
def _naming_the_extra() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConversionError(
            f"tables of rollouts need {error.name}: pip install 'tinkerscript[datasets]'"
        ) from error


def _schema() -> Any:
    arrow = _arrow()
    segment = {
        "start": arrow.int32(),
        "end": arrow.int32(),
        "new_prompt": arrow.int32(),
        "number": arrow.int32(),
        "call": arrow.string(),
    }
    columns = {
        "group": arrow.int32(),
        "group_id": arrow.string(),
        "episode": arrow.int32(),
        "episode_uuid": arrow.string(),
        "episode_reward": arrow.float64(),
        "metadata": arrow.string(),
        "other_calls": arrow.list_(arrow.struct({"number": arrow.int32(), "call": arrow.string()})),
        "env_name": arrow.string(),
        "env_example_id": arrow.string(),
        "sequence_reward": arrow.float64(),
        "shaped": arrow.bool_(),
        "parent": arrow.int32(),
        "fork": arrow.int32(),
        "tokens": arrow.list_(arrow.int32()),
        "sampled": arrow.list_(arrow.bool_()),
        "loss_mask": arrow.list_(arrow.bool_()),
        "logprobs": arrow.list_(arrow.float32()),
        "rewards": arrow.list_(arrow.float32()),
        "segments": arrow.list_(arrow.struct(segment)),
    }
    return arrow.schema(columns)


# To rows


def _rows(groups: Iterable[RolloutGroup]) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(groups):
        for index, episode in enumerate(group.episodes):
            check_episode_carried(episode, "a table", TRAITS, ())
            shared = {
                "group": number,
                "group_id": group.group_id,
                "episode": index,
                "episode_uuid": episode.episode_uuid,
                "episode_reward": episode.reward,
                "metadata": _metadata(episode),
            }
            yield from _rows_of(episode, shared)


def _metadata(episode: EpisodeRollouts) -> str:
    try:
        data = msgspec.json.encode(episode.metadata)
    except TypeError as error:
        raise ConversionError(f"the metadata of episode {episode.episode_uuid}: {error}") from error
    if msgspec.json.decode(data) != episode.metadata:
        raise ConversionError(
            f"the metadata of episode {episode.episode_uuid} would not read back equal: use JSON's types, "
            "and no NaN"
        )
    return data.decode()


def _rows_of(episode: EpisodeRollouts, shared: dict[str, Any]) -> Iterator[dict[str, Any]]:
    numbers = {call.call_id: number for number, call in enumerate(episode.calls)}
    held = {segment.call.call_id for rollout in episode.rollouts for segment in rollout.segments}
    shared["other_calls"] = [
        {"number": number, "call": msgspec.json.encode(call).decode()}
        for number, call in enumerate(episode.calls)
        if call.call_id not in held
    ]
    if not episode.rollouts:
        yield shared | {name: [] for name in ("tokens", "sampled", "loss_mask", "logprobs", "segments")}
    for rollout in episode.rollouts:
        yield shared | _row(rollout, numbers)
        shared["other_calls"] = []


def _row(rollout: Rollout, numbers: Mapping[str, int]) -> dict[str, Any]:
    return {
        "env_name": rollout.env_name,
        "env_example_id": rollout.env_example_id,
        "sequence_reward": rollout.episode_reward,
        "shaped": rollout.shaped,
        "parent": rollout.parent,
        "fork": rollout.fork,
        "tokens": rollout.tokens,
        "sampled": rollout.sampled,
        "loss_mask": rollout.loss_mask,
        "logprobs": rollout.logprobs,
        "rewards": rollout.rewards,
        "segments": [_segment_row(rollout, segment, numbers) for segment in rollout.segments],
    }


def _segment_row(rollout: Rollout, segment: Segment, numbers: Mapping[str, int]) -> dict[str, Any]:
    call = segment.call
    if numbers and call.call_id not in numbers:
        raise ConversionError(
            f"the call {call.call_id} of a sequence is not among those of its episode {rollout.episode_uuid}"
        )
    fields = {name: value for name, value in msgspec.structs.asdict(call).items() if name not in _IDS}
    return {
        "start": segment.start,
        "end": segment.end,
        "new_prompt": len(call.new_prompt) // 4,
        "number": numbers.get(call.call_id, -1),
        "call": msgspec.json.encode(fields).decode(),
    }


# From rows


def _groups(rows: Iterable[Row]) -> Iterator[RolloutGroup]:
    for _, same in groupby(rows, key=lambda row: row["group"]):
        episodes = [list(part) for _, part in groupby(same, key=lambda row: row["episode"])]
        yield RolloutGroup(episodes[0][0]["group_id"], tuple(_episode(part) for part in episodes))


def _episode(rows: list[Row]) -> EpisodeRollouts:
    rollouts = tuple(_rollout(row) for row in rows if row["tokens"])
    calls = {
        other["number"]: msgspec.json.decode(other["call"], type=Call)
        for row in rows
        for other in row["other_calls"]
    }
    for row, rollout in zip((row for row in rows if row["tokens"]), rollouts, strict=True):
        for part, segment in zip(row["segments"], rollout.segments, strict=True):
            calls[part["number"]] = segment.call
    calls.pop(-1, None)
    return EpisodeRollouts(
        episode_uuid=rows[0]["episode_uuid"],
        reward=rows[0]["episode_reward"],
        rollouts=rollouts,
        calls=tuple(calls[number] for number in sorted(calls)),
        metadata=msgspec.json.decode(rows[0]["metadata"]),
    )


def _rollout(row: Row) -> Rollout:
    tokens, logprobs = np.array(row["tokens"], np.int32), np.array(row["logprobs"], np.float32)
    if abs(row["episode_reward"]) > MAX_REWARD:  # NaN: a rollout without a reward.
        raise ConversionError(
            f"episode {row['episode_uuid']}: its reward {row['episode_reward']} is above {MAX_REWARD:g} in "
            "magnitude; leave it out"
        )
    return Rollout(
        episode_uuid=row["episode_uuid"],
        tokens=tokens,
        sampled=np.array(row["sampled"], np.bool_),
        loss_mask=np.array(row["loss_mask"], np.bool_),
        logprobs=logprobs,
        segments=tuple(
            Segment(_call(part, tokens, logprobs), part["start"], part["end"]) for part in row["segments"]
        ),
        env_name=row["env_name"],
        env_example_id=row["env_example_id"],
        episode_reward=row["sequence_reward"],
        rewards=None if row["rewards"] is None else np.array(row["rewards"], np.float32),
        shaped=row["shaped"],
        parent=row["parent"],
        fork=row["fork"],
    )


def _call(row: Row, tokens: np.ndarray, logprobs: np.ndarray) -> Call:
    start, end = row["start"], row["end"]
    if end > len(tokens) or start < row["new_prompt"]:
        raise ConversionError(
            f"a call's span [{start}, {end}) is outside of its sequence of {len(tokens)} tokens"
        )
    fields: dict[str, Any] = msgspec.json.decode(row["call"])
    ids = {
        "new_prompt": tokens[start - row["new_prompt"] : start].tobytes(),
        "sampled": tokens[start:end].tobytes(),
        "logprobs": logprobs[start:end].tobytes(),
    }
    return msgspec.convert({**fields, **ids}, Call)


def _parts(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    part: list[dict[str, Any]] = []
    for row in rows:
        part.append(row)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part
