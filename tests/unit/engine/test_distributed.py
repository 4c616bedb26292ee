"""Several devices without their processes: how data is shared out, how rank 0 meets and loses the others."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from tinkerscript.commands.train import is_follower
from tinkerscript.config import parse_config
from tinkerscript.engine import ranks as ranks_module
from tinkerscript.engine.distributed import FILLER, Portion, portions
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.packing import token_trees
from tinkerscript.engine.ranks import Ranks, RankSpec, check_devices, meet
from tinkerscript.engine.training import Example
from tinkerscript.errors import ConfigError, EngineError


def example(index: int, ids: Sequence[int]) -> Example:
    return Example(index, np.array(ids, np.int64), {"target_tokens": np.array(ids, np.int64)})


def groups(number: int, *, prompt: int, replies: int, reply: int) -> list[Example]:
    """Groups of sequences that share a prompt, and nothing before or after it."""
    random = np.random.default_rng(3)
    found: list[list[int]] = []
    for prompt_first in range(2, 2 + number):
        start = [prompt_first, *random.integers(2, 64, prompt - 1).tolist()]
        for reply_first in range(2, 2 + replies):
            found.append([*start, reply_first, *random.integers(2, 64, reply - 1).tolist()])
    return [example(index, ids) for index, ids in enumerate(found)]


def shared_out(examples: list[Example], *, ranks: int, budget: int = 4096) -> list[Portion]:
    def rows(tokens: int) -> Any:
        return token_trees([each.ids for each in examples], pair_cost=1e-4, budget=tokens)

    return portions(examples, rows, ranks=ranks, budget=budget)


def tokens(portion: Portion) -> int:
    return sum(tree.size for batch in portion.batches for tree in batch)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_portions_hold_each_example_once_in_equally_many_microbatches(ranks: int) -> None:
    examples = groups(13, prompt=40, replies=4, reply=20)
    found = shared_out(examples, ranks=ranks, budget=300)
    indexes = sorted(each.index for portion in found for each in portion.examples if each.index != FILLER)
    assert indexes == list(range(len(examples)))
    assert len({len(portion.batches) for portion in found}) == 1
    for portion in found:
        rows = [(tree, *row) for batch in portion.batches for tree in batch for row in tree.paths]
        for tree, index, path in rows:
            np.testing.assert_array_equal(tree.ids[path], portion.examples[index].ids)
        assert portion.examples[-1].index == FILLER
        used = {index for _, index, _ in rows}
        assert used | {len(portion.examples) - 1} == set(range(len(portion.examples)))


def test_portions_have_about_equally_many_tokens_and_keep_groups_whole() -> None:
    examples = groups(12, prompt=50, replies=4, reply=5)
    found = shared_out(examples, ranks=3)
    assert [tokens(portion) for portion in found] == [4 * (50 + 4 * 5)] * 3


def test_a_group_is_divided_where_ranks_would_idle_and_little_is_shared() -> None:
    examples = groups(1, prompt=10, replies=8, reply=100)
    assert max(map(tokens, shared_out(examples, ranks=2))) == 10 + 4 * 100
    # Here a second copy of the prompt would save next to nothing.
    kept = shared_out(groups(1, prompt=1000, replies=4, reply=10), ranks=2)
    assert sorted(map(tokens, kept)) == [1, 1000 + 4 * 10]


SPEC = RankSpec(
    folder=Path("model"),
    device="cpu",
    dtype=torch.float32,
    autocast=torch.float32,
    quantization="none",
    lora=None,
    sharding="replicate",
    activation_checkpointing=False,
    threads=1,
    timeout_s=60.0,
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Generator[Ranks]:
    """Rank 0 of two that a launcher has started; from now on the environment is that of rank 1."""
    agent = TCPStore("127.0.0.1", 0, is_master=True)  # As torchrun has one.
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks(2, SPEC)
    monkeypatch.setenv("RANK", "1")
    yield ranks
    ranks.close()


def joined() -> tuple[Any, Connection]:
    """As rank 1, which its launcher started."""
    store, connection = meet(2)
    connection.send(1)
    assert connection.recv() == SPEC
    return store, connection


def test_a_rank_that_a_launcher_started_joins_and_is_named_when_its_connection_ends(launched: Ranks) -> None:
    store, connection = joined()
    connection.send("loaded")
    assert launched.answers(10.0) == ["loaded"]
    launched.tell("compute", [("portion",)])
    assert connection.recv() == ("compute", ("portion",))
    connection.close()
    failure = launched.failure.exception(timeout=10)
    assert str(failure) == "rank 1 of 2 closed its connection; its launcher has its exit code and its log"
    with pytest.raises(EngineError, match="rank 1 of 2 closed"):
        launched.answers(10.0)
    del store


def test_a_connection_without_the_secret_is_turned_away(launched: Ranks) -> None:
    host, port = "127.0.0.1", launched._listener.address[1]  # pyright: ignore
    with pytest.raises(Exception, match="digest sent was rejected"):
        Client((host, port), authkey=b"guess")
    _, connection = joined()
    connection.close()


def test_ranks_that_do_not_join_are_named(launched: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "START_S", 0.05)
    with pytest.raises(EngineError, match=r"the ranks \[1\] did not join within 0 s"):
        launched.join()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("devices: 2, backend: tinker", "devices: 2: only the embedded engine trains on several"),
        ("devices: 2, device: 'cuda:1'", "'cuda:1' cannot be shared out over devices: 2"),
    ],
)
def test_settings_of_devices_that_cannot_be_are_refused(engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(f"engine: {{{engine}}}", source="run.yaml")


def test_more_devices_than_there_are_are_refused(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"engine.devices: 2 takes 2 CUDA devices here, and there are 1"):
        check_devices(2, "cuda")
    with pytest.raises(ConfigError, match=r"'cpu:0' cannot be shared out over engine.devices: 2"):
        EmbeddedEngine(random_model, devices=2, device="cpu:0")


def test_a_launchers_processes_are_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("engine: {devices: 2}")

    def follows() -> bool:
        return is_follower(config, [], resume=None, join=None)

    assert not follows()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"engine.devices: 2, but a launcher started 3 processes"):
        follows()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="the environment lacks RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        follows()
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert not follows()
    monkeypatch.setenv("RANK", "1")
    assert follows()
