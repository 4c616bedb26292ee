"""`tinkerscript train` before torch is imported: what the user can put right is refused first."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tinkerscript.commands import train
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config for `tinkerscript train`, in an empty folder, where nothing that trains may be imported."""
    for name in ("CLIENT", "ADMIN"):
        monkeypatch.delenv(f"TINKERSCRIPT_{name}_TOKEN", raising=False)
        monkeypatch.delenv(f"TINKERSCRIPT_{name}_TOKEN_FILE", raising=False)

    def import_torch(*_: object, **__: object) -> None:
        raise AssertionError("torch would be imported now")

    monkeypatch.setattr(train, "_import_training", import_torch)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    free = "interchange_server: {interchange_server_port: 0}"
    path.write_text(f"task: {{name: tasks.py@words}}\n{free}\n")
    return path


async def refused(config: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        await train.train_command(config, list(overrides), Console(), resume=None, join=None)
    return str(error.value)


async def test_a_missing_model_is_named(config: Path) -> None:
    assert "no-such-model" in await refused(config, "engine.model=no-such-model")


async def test_a_model_of_the_hub_gets_its_commit(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a run use the same files: the config that they read names the commit."""
    monkeypatch.setattr(train, "pinned_model", lambda model, **_: f"{model}@c0ffee")
    seen: list[str] = []

    def imported(config: RunConfig, *_: object, **__: object) -> None:
        seen.append(config.engine.model)
        raise ConfigError("that is all")

    monkeypatch.setattr(train, "_import_training", imported)
    assert await refused(config, "engine.model=acme/llama") == "that is all"
    assert seen == ["acme/llama@c0ffee"]
    server = config.parent / "server"
    server.mkdir()
    (server / "config.yaml").write_text("engine: {model: acme/llama@beef}\n")
    with pytest.raises(ConfigError, match="that is all"):
        await train.train_command(config, ["engine.model=acme/llama"], Console(), resume=None, join=server)
    assert seen[1:] == ["acme/llama@beef@c0ffee"], "the server's commit"
    with pytest.raises(ConfigError, match="renders for 'acme/llama@beef'"):
        await train.train_command(config, ["engine.model=acme/other"], Console(), resume=None, join=server)


async def test_a_host_that_needs_tokens_names_them(config: Path) -> None:
    message = await refused(config, "interchange_server.interchange_server_host=0.0.0.0")
    assert "TINKERSCRIPT_CLIENT_TOKEN and TINKERSCRIPT_ADMIN_TOKEN must be set" in message


def test_a_run_is_resumed_by_the_link_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on in its own folder, whatever the link names later."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: {name: a.py@a}\n")
    (tmp_path / "runs" / "latest").symlink_to("first")
    _, found = train.open_run(None, [], resume=Path("runs/latest"), join=None)
    assert found == Path("runs/first")
    (tmp_path / "runs" / "gone").symlink_to("gone")
    with pytest.raises(ConfigError, match="there is no run in runs/gone"):
        train.open_run(None, [], resume=Path("runs/gone"), join=None)
