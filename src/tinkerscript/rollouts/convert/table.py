"""Rollouts <-> Arrow tables, Parquet files and Hugging Face datasets: one row per sequence.

Invariant: what is written reads back equal, including calls. A call's ids and logprobs are stored only once,
as part of its row; a rollout whose calls disagree with it is refused.

Needs `tinkerscript[datasets]`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tinkerscript.errors import MAX_REWARD, ConversionError
from tinkerscript.rollouts.call import Call
from tinkerscript.rollouts.rollout import Rollout, Segment

ROWS_PER_GROUP = 1024
"""Sequences per Parquet row group, which is what a writer holds in memory."""

_IDS = ("new_prompt", "sampled", "logprobs")
"""Fields of a call that are slices of its row."""


def write_parquet(path: str | Path, rollouts: Iterable[Rollout]) -> int:
    """Write sequences to a Parquet file, `ROWS_PER_GROUP` at a time. Returns their number.

    Raises ConversionError for a rollout that would not read back equal, leaving an incomplete file.
    """
    schema = _schema()
    number = 0
    with _parquet().ParquetWriter(path, schema, compression="zstd") as writer:
        for part in _parts(rollouts, ROWS_PER_GROUP):
            writer.write_table(to_table(part))
            number += len(part)
    return number


def read_parquet(path: str | Path) -> Iterator[Rollout]:
    """Read the sequences of a `write_parquet` file in order, one row group at a time.

    Raises ConversionError for a file with different columns.
    """
    with _parquet().ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield from from_table(file.read_row_group(number))


def to_dataset(rollouts: Iterable[Rollout]) -> Any:
    """Convert sequences to a `datasets.Dataset`. Raises ConversionError."""
    datasets = _datasets()
    table = to_table(list(rollouts))
    return datasets.Dataset.from_dict(
        table.to_pydict(), features=datasets.Features.from_arrow_schema(table.schema)
    )


def from_dataset(dataset: Any) -> list[Rollout]:
    """Convert a dataset made by `to_dataset` back to sequences."""
    return from_table(dataset.with_format("arrow")[:])


def to_table(rollouts: Sequence[Rollout]) -> Any:
    """Convert sequences to a `pyarrow.Table`. Raises ConversionError for one that would not read back
    equal."""
    return _arrow().Table.from_pylist([_row(rollout) for rollout in rollouts], schema=_schema())


def from_table(table: Any) -> list[Rollout]:
    """Convert a table made by `to_table` back to sequences. Raises ConversionError for missing columns."""
    missing = [name for name in _schema().names if name not in table.column_names]
    if missing:
        raise ConversionError(f"not a table of rollouts: it has no column {', '.join(missing)}")
    return [_rollout(row) for row in table.to_pylist()]


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
        "call": arrow.string(),
    }
    columns = {
        "episode_uuid": arrow.string(),
        "env_name": arrow.string(),
        "env_example_id": arrow.string(),
        "episode_reward": arrow.float64(),
        "shaped": arrow.bool_(),
        "parent": arrow.int32(),
        "fork": arrow.int32(),
        "tokens": arrow.list_(arrow.int32()),
        "sampled": arrow.list_(arrow.bool_()),
        "logprobs": arrow.list_(arrow.float32()),
        "rewards": arrow.list_(arrow.float32()),
        "segments": arrow.list_(arrow.struct(segment)),
    }
    return arrow.schema(columns)


def _row(rollout: Rollout) -> dict[str, Any]:
    return {
        "episode_uuid": rollout.episode_uuid,
        "env_name": rollout.env_name,
        "env_example_id": rollout.env_example_id,
        "episode_reward": rollout.episode_reward,
        "shaped": rollout.shaped,
        "parent": rollout.parent,
        "fork": rollout.fork,
        "tokens": rollout.tokens,
        "sampled": rollout.sampled,
        "logprobs": rollout.logprobs,
        "rewards": rollout.rewards,
        "segments": [_segment_row(rollout, segment) for segment in rollout.segments],
    }


def _segment_row(rollout: Rollout, segment: Segment) -> dict[str, Any]:
    fields = {name: value for name, value in msgspec.structs.asdict(segment.call).items() if name not in _IDS}
    row = {
        "start": segment.start,
        "end": segment.end,
        "new_prompt": len(segment.call.new_prompt) // 4,
        "call": msgspec.json.encode(fields).decode(),
    }
    if _call(row, rollout.tokens, rollout.logprobs) != segment.call:
        raise ConversionError(
            f"call {segment.call.call_id} of episode {rollout.episode_uuid} disagrees with its sequence "
            "about tokens or logprobs: writing the sequence would lose the call's"
        )
    return row


def _rollout(row: Mapping[str, Any]) -> Rollout:
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
        logprobs=logprobs,
        segments=tuple(
            Segment(_call(part, tokens, logprobs), part["start"], part["end"]) for part in row["segments"]
        ),
        env_name=row["env_name"],
        env_example_id=row["env_example_id"],
        episode_reward=row["episode_reward"],
        rewards=None if row["rewards"] is None else np.array(row["rewards"], np.float32),
        shaped=row["shaped"],
        parent=row["parent"],
        fork=row["fork"],
    )


def _call(row: Mapping[str, Any], tokens: np.ndarray, logprobs: np.ndarray) -> Call:
    start, end = row["start"], row["end"]
    if end > len(tokens) or start < row["new_prompt"]:
        raise ConversionError(
            f"a call's span [{start}, {end}) is outside of its sequence of {len(tokens)} tokens"
        )
    fields: dict[str, Any] = msgspec.json.decode(row["call"])
    return Call(
        **fields,
        new_prompt=tokens[start - row["new_prompt"] : start].tobytes(),
        sampled=tokens[start:end].tobytes(),
        logprobs=logprobs[start:end].tobytes(),
    )


def _parts(rollouts: Iterable[Rollout], size: int) -> Iterator[list[Rollout]]:
    part: list[Rollout] = []
    for rollout in rollouts:
        part.append(rollout)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part
