"""SkyRL's server, with its JAX backend on the CPU, trains the demo task (`make tinker`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tinkerscript.model_folder import TINY_MODEL

pytestmark = pytest.mark.timeout(3600)

ROOT = Path(__file__).parents[2]
SERVER = ROOT / ".venv-skyrl" / "bin"
SDK = ROOT / ".venv" / "skyrl-sdk" / "site-packages"

BACKEND = {"max_lora_adapters": 3, "max_lora_rank": 32, "train_micro_batch_size": 8}

LACKS = (
    "cannot finish a session",
    "it ignores training.grad_clip_norm",
    "it ignores engine.lora.targets",
    "it refuses to save a checkpoint under a name that a run has used",
)


@pytest.fixture
def skyrl(tmp_path: Path) -> Iterator[str]:
    """The URL of the server, which wants to be started by `uv run` and starts its engine so itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = ["uv", "run", "--no-project", "-m", "skyrl.tinker.api", "--backend", "jax"]
    command += ["--base-model", str(TINY_MODEL), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--checkpoints-base", str(tmp_path / "checkpoints")]
    command += ["--database-url", f"sqlite:///{tmp_path / 'skyrl.db'}"]
    command += ["--backend-config", json.dumps(BACKEND | {"sample_max_num_sequences": 64})]
    environment = os.environ | {"VIRTUAL_ENV": str(SERVER.parent), "UV_OFFLINE": "1"}
    environment["PATH"] = f"{SERVER}:{os.environ['PATH']}"
    log = tmp_path / "skyrl.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            until_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def until_ready(url: str, process: subprocess.Popen[bytes], log: Path, *, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/api/v1/healthz").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"not ready within {seconds} s:\n{log.read_text()}")


def test_skyrl_trains_the_demo_task(skyrl: str, tmp_path: Path) -> None:
    config = {
        "experiment_dir": str(tmp_path / "run"),
        "seed": 1,
        "interchange_server": {"interchange_method": "ipc", "interchange_server_port": 0},
        "task": {
            "name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
            "train_args": {"split": "train"},
            "eval_args": {"split": "test"},
        },
        "engine": {"backend": "tinker", "base_url": skyrl, "model": "tiny", "lora": {"rank": 32}},
        "sampling": {"max_tokens": 8},
        "training": {
            "steps": 12,
            "groups_per_step": 16,
            "group_size": 8,
            "loss_fn": "ppo",
            "learning_rate": 3e-3,
            "lr_schedule": "linear",
        },
        "evaluation": {"episodes": 200, "every_steps": 4, "interim_episodes": 100},
        "workers": {"count": 2, "concurrency": 64},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with (tmp_path / "train.log").open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "tinkerscript", "train", "config.yaml"],
            cwd=tmp_path,
            env=os.environ
            | {"TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0"}
            | {"COLUMNS": "300", "PYTHONPATH": str(SDK)},
            stdout=output,
            stderr=output,
            timeout=3000,
        )
    printed = (tmp_path / "train.log").read_text()
    print(printed)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_lost"]) == (12, 0)
    assert summary["eval_before"] < 0.55 < 0.8 < summary["eval_after"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["alignment/max_abs_dlogp"] for line in lines if "alignment/max_abs_dlogp" in line]
    assert len(gaps) == 12
    assert max(gaps) < 1e-4
    for lack in LACKS:
        assert lack in printed
