"""The command lines and environments of vLLM and SGLang as replicas of a run."""

from __future__ import annotations

import json

from tinkerscript.config import EngineConfig, InferenceConfig
from tinkerscript.processes.launcher import Slot
from tinkerscript.vllm_plugin import ADAPTERS, TRANSFER

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `vllm serve --max-lora-rank` takes."""

MODEL_NAME = "base"
"""What a replica calls the model without an adapter."""

KEY = "VLLM_API_KEY"
"""The environment variable from which vLLM reads its API key."""


def command(engine: EngineConfig, inference: InferenceConfig) -> list[str]:
    """The command of one replica."""
    launch = inference.launch
    server = _sglang(engine, inference) if inference.backend == "sglang" else _vllm(engine, inference)
    return [
        *(launch.python or "python", "-m"),
        *server,
        *("--served-model-name", MODEL_NAME),
        *("--host", Slot.HOST, "--port", Slot.PORT),
        *("--dtype", engine.dtype),
        *("--tensor-parallel-size", str(launch.tensor_parallel)),
        *launch.args,
    ]


def _vllm(engine: EngineConfig, inference: InferenceConfig) -> list[str]:
    rank = next((each for each in RANKS if each >= engine.lora.rank), engine.lora.rank)
    adapters = [
        "--enable-lora",
        *("--max-lora-rank", str(rank), "--max-loras", str(inference.max_loras)),
        *("--max-cpu-loras", str(inference.max_loras)),
    ]
    whole = ["--weight-transfer-config", json.dumps({"backend": TRANSFER})]
    return [
        "vllm.entrypoints.openai.api_server",
        *("--model", Slot.MODEL),
        *(adapters if engine.lora.rank else whole),
        *(["--enable-sleep-mode"] if inference.sleep and inference.launch.gpus else []),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *([] if inference.launch.gpus else ["--enforce-eager"]),
    ]


def _sglang(engine: EngineConfig, inference: InferenceConfig) -> list[str]:
    adapters = [
        "--enable-lora",
        *("--max-lora-rank", str(engine.lora.rank), "--max-loras-per-batch", str(inference.max_loras)),
        *("--lora-target-modules", "all"),
    ]
    return [
        "sglang.launch_server",
        *("--model-path", Slot.MODEL),
        *(adapters if engine.lora.rank else []),
        *(["--enable-memory-saver", "--enable-weights-cpu-backup"] if inference.sleep else []),
        *("--sampling-defaults", "openai"),
        "--enable-metrics",
        *([] if inference.launch.gpus else ["--device", "cpu"]),
        *("--api-key", Slot.KEY),  # It reads its key from nowhere else.
    ]


def environment(engine: EngineConfig, inference: InferenceConfig, number: int) -> dict[str, str]:
    """The environment of replica `number`, besides its key and that of its machine."""
    launch = inference.launch
    first = number * launch.tensor_parallel
    named = [] if launch.gpus == "any" else launch.gpus
    gpus = ",".join(map(str, named[first : first + launch.tensor_parallel]))
    vllm = {
        # Adapters are found by the plugin when a request names them.
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        ADAPTERS: Slot.ADAPTERS,
        # Replacing all weights and sleeping are for development mode alone.
        **({"VLLM_SERVER_DEV_MODE": "1"} if inference.sleep or not engine.lora.rank else {}),
    }
    return {
        **(vllm if inference.backend == "vllm" else {}),
        **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
        **launch.env,
    }
