"""Replicas as supervised children of the run: what is started, and where."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tinkerscript.config import EngineConfig, InferenceConfig
from tinkerscript.processes.supervisor import Child
from tinkerscript.server.addresses import ADAPTERS_FOLDER
from tinkerscript.train.replicas.replica import Replica
from tinkerscript.vllm_plugin import ADAPTERS, TRANSFER

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `vllm serve --max-lora-rank` takes."""

MODEL_NAME = "base"
"""What a replica calls the model without an adapter."""


@dataclass(frozen=True)
class LaunchedReplica:
    """A replica and the process that it is."""

    replica: Replica
    child: Child


def launched_replicas(
    engine: EngineConfig, inference: InferenceConfig, *, model: Path, folder: Path, timeout_s: float
) -> list[LaunchedReplica]:
    """The replicas of a run folder, not started yet. `model`: the model's folder."""
    key = secrets.token_hex(16)
    config = inference.model_copy(update={"model": MODEL_NAME})
    found: list[LaunchedReplica] = []
    for number in range(inference.launch.replicas):
        port = free_port()
        name = f"replica {number}"
        argv = command(engine, inference, model=model, port=port, key=key)
        environ = environment(engine, inference, number, adapters=folder / ADAPTERS_FOLDER, key=key)
        log = folder / "logs" / f"replica-{number}.log"
        child = Child(name, partial(_same, argv), log, environ=environ)
        replica = Replica(
            name,
            f"http://127.0.0.1:{port}",
            config,
            api_key=key,
            timeout_s=timeout_s,
            is_launched=True,
            adapters=bool(engine.lora.rank),
        )
        found.append(LaunchedReplica(replica, child))
    return found


def command(
    engine: EngineConfig, inference: InferenceConfig, *, model: Path, port: int, key: str
) -> list[str]:
    """The argv of one replica; `key` is its API key, which vLLM reads from its environment."""
    launch = inference.launch
    if inference.backend == "sglang":
        server = [*_sglang(engine, inference, model), "--api-key", key]
    else:
        server = _vllm(engine, inference, model)
    return [
        *(sys.executable, "-m", "tinkerscript.processes.tether"),
        *(launch.python or sys.executable, "-m"),
        *server,
        *("--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", engine.dtype),
        *("--tensor-parallel-size", str(launch.tensor_parallel)),
        *launch.args,
    ]


def _vllm(engine: EngineConfig, inference: InferenceConfig, model: Path) -> list[str]:
    rank = next((each for each in RANKS if each >= engine.lora.rank), engine.lora.rank)
    adapters = [
        "--enable-lora",
        *("--max-lora-rank", str(rank), "--max-loras", str(inference.max_loras)),
        *("--max-cpu-loras", str(inference.max_loras)),
    ]
    whole = ["--weight-transfer-config", json.dumps({"backend": TRANSFER})]
    return [
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model)),
        *(adapters if engine.lora.rank else whole),
        *(["--enable-sleep-mode"] if inference.sleep and inference.launch.gpus else []),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *([] if inference.launch.gpus else ["--enforce-eager"]),
    ]


def _sglang(engine: EngineConfig, inference: InferenceConfig, model: Path) -> list[str]:
    adapters = [
        "--enable-lora",
        *("--max-lora-rank", str(engine.lora.rank), "--max-loras-per-batch", str(inference.max_loras)),
        *("--lora-target-modules", "all"),
    ]
    return [
        "sglang.launch_server",
        *("--model-path", str(model)),
        *(adapters if engine.lora.rank else []),
        *(["--enable-memory-saver", "--enable-weights-cpu-backup"] if inference.sleep else []),
        *("--sampling-defaults", "openai"),
        "--enable-metrics",
        *([] if inference.launch.gpus else ["--device", "cpu"]),
    ]


def environment(
    engine: EngineConfig, inference: InferenceConfig, number: int, *, adapters: Path, key: str
) -> dict[str, str]:
    """The environment of replica `number`; `key` is its API key."""
    launch = inference.launch
    first = number * launch.tensor_parallel
    gpus = ",".join(map(str, launch.gpus[first : first + launch.tensor_parallel]))
    vllm = {
        "VLLM_API_KEY": key,
        # Adapters are found by the plugin when a request names them.
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        ADAPTERS: str(adapters),
        # Replacing all weights and sleeping are for development mode alone.
        **({"VLLM_SERVER_DEV_MODE": "1"} if inference.sleep or not engine.lora.rank else {}),
    }
    return {
        **os.environ,
        **(vllm if inference.backend == "vllm" else {}),
        **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
        **launch.env,
    }


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _same(argv: list[str], incarnation: int) -> list[str]:
    return argv
