"""Groups of rollouts as a table: one row per training sequence, in Parquet or Arrow.

docs/rollouts.md#parquet describes the columns. Needs `tinkerscript[datasets]`.
`datasets.Dataset.from_parquet(path)` gives a Hugging Face dataset, and
`from_table(dataset.with_format("arrow")[:])` reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from tinkerscript.errors import ConversionError
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import Call, PlacedImage
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout, Segment
from tinkerscript.rollouts.trainers import refuse_episode_errors

ROWS_PER_GROUP = 1024

_ARRAYS = {
    "tokens": np.int32,
    "sampled": np.bool_,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "rewards": np.float32,
}
_FIELDS = ("env_name", "env_example_id", "shaped", "parent", "fork")

Row = Mapping[str, Any]


def write_parquet(path: str | Path, groups: Iterable[RolloutGroup]) -> int:
    """Write groups to a Parquet file. Returns the number of rows.

    Raises ConversionError for a rollout that must not train or would not read back equal, and then leaves an
    existing file as it was.
    """
    arrow, parquet = _pyarrow()
    schema, rows, number = _schema(), _rows(groups), 0
    draft = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        with parquet.ParquetWriter(draft, schema, compression="zstd") as writer:
            while part := list(islice(rows, ROWS_PER_GROUP)):
                writer.write_table(arrow.Table.from_pylist(part, schema=schema))
                number += len(part)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return number


def read_parquet(path: str | Path) -> Iterator[RolloutGroup]:
    """Read the groups of a `write_parquet` file in order, about one row group at a time.

    Raises ConversionError for different columns.
    """
    _, parquet = _pyarrow()
    with parquet.ParquetFile(path) as file:
        parts = (file.read_row_group(number) for number in range(file.num_row_groups))
        yield from _groups(row for part in parts for row in _checked(part))


def to_table(groups: Iterable[RolloutGroup]) -> Any:
    """Convert groups to a `pyarrow.Table`. Raises ConversionError as `write_parquet` does."""
    arrow, _ = _pyarrow()
    return arrow.Table.from_pylist(list(_rows(groups)), schema=_schema())


def from_table(table: Any) -> list[RolloutGroup]:
    """Convert a table of `to_table` back. Raises ConversionError for missing columns."""
    return list(_groups(_checked(table)))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # noqa: PLC0415 (optional dependency)
        from pyarrow import parquet  # noqa: PLC0415 (optional dependency)
    except ModuleNotFoundError as error:
        raise ConversionError(
            f"tables of rollouts need {error.name}: pip install 'tinkerscript[datasets]'"
        ) from error
    return pyarrow, parquet


def _schema() -> Any:
    arrow, _ = _pyarrow()
    number, text = arrow.int32(), arrow.string()
    columns = {
        "group": number,
        "group_id": text,
        "episode": number,
        "episode_uuid": text,
        "episode_reward": arrow.float64(),
        "metadata": text,
        "env_name": text,
        "env_example_id": text,
        "sequence_reward": arrow.float64(),
        "shaped": arrow.bool_(),
        "parent": number,
        "fork": number,
        **{name: arrow.list_(arrow.from_numpy_dtype(kind)) for name, kind in _ARRAYS.items()},
        "segments": arrow.list_(arrow.struct({"start": number, "end": number, "call": number})),
        "images": arrow.list_(arrow.struct({"start": number, "file": arrow.binary()})),
        "calls": arrow.binary(),
    }
    return arrow.schema(columns)


def _rows(groups: Iterable[RolloutGroup]) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(groups):
        for index, episode in enumerate(group.episodes):
            refuse_episode_errors(episode, "a table")
            calls = episode.calls or [s.call for rollout in episode.rollouts for s in rollout.segments]
            shared: dict[str, Any] = {
                "group": number,
                "group_id": group.group_id,
                "episode": index,
                "episode_uuid": episode.episode_uuid,
                "episode_reward": episode.reward,
                "metadata": _metadata(episode),
                "calls": msgspec.msgpack.encode(calls),
            }
            if not episode.rollouts:
                yield shared | {name: [] for name in (*_ARRAYS, "segments", "images")}
            places = {call.call_id: place for place, call in enumerate(calls)}
            for rollout in episode.rollouts:
                yield shared | _row(rollout, places)
                shared["calls"] = None


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


def _row(rollout: Rollout, places: Mapping[str, int]) -> dict[str, Any]:
    for segment in rollout.segments:
        if segment.call.call_id not in places:
            raise ConversionError(
                f"the call {segment.call.call_id} of a sequence is not among those of its episode "
                f"{rollout.episode_uuid}"
            )
    return {
        **{name: getattr(rollout, name) for name in (*_ARRAYS, *_FIELDS)},
        "sequence_reward": rollout.episode_reward,
        "segments": [
            {"start": each.start, "end": each.end, "call": places[each.call.call_id]}
            for each in rollout.segments
        ],
        "images": [{"start": image.start, "file": image.data} for image in rollout.images],
    }


def _checked(table: Any) -> list[Row]:
    missing = [name for name in _schema().names if name not in table.column_names]
    if missing:
        raise ConversionError(f"not a table of rollouts: it has no column {', '.join(missing)}")
    return table.to_pylist()


def _groups(rows: Iterable[Row]) -> Iterator[RolloutGroup]:
    for _, same in groupby(rows, key=lambda row: row["group"]):
        episodes = [list(part) for _, part in groupby(same, key=lambda row: row["episode"])]
        yield RolloutGroup(episodes[0][0]["group_id"], tuple(_episode(part) for part in episodes))


def _episode(rows: list[Row]) -> EpisodeRollouts:
    first = rows[0]
    if first["calls"] is None:
        raise ConversionError(
            f"the first row of episode {first['episode_uuid']}, which has its calls, is missing"
        )
    calls = msgspec.msgpack.decode(first["calls"], type=tuple[Call, ...])
    return EpisodeRollouts(
        episode_uuid=first["episode_uuid"],
        reward=first["episode_reward"],
        rollouts=tuple(_rollout(row, calls) for row in rows if row["tokens"]),
        calls=calls,
        metadata=msgspec.json.decode(first["metadata"]),
    )


def _rollout(row: Row, calls: tuple[Call, ...]) -> Rollout:
    arrays = {
        name: None if row[name] is None else np.array(row[name], kind) for name, kind in _ARRAYS.items()
    }
    segments = tuple(Segment(calls[part["call"]], part["start"], part["end"]) for part in row["segments"])
    return Rollout(
        episode_uuid=row["episode_uuid"],
        segments=segments,
        images=tuple(PlacedImage(image["start"], image["file"]) for image in row["images"]),
        episode_reward=row["sequence_reward"],
        **{name: row[name] for name in _FIELDS},
        **cast("dict[str, Any]", arrays),
    )
