"""Real vLLM servers, its CPU build, from the environment that `make vllm` installs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.processes.launcher import free_port
from tinkerscript.vllm_plugin import ADAPTERS, TRANSFER

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LAUNCH = yaml.safe_load((ROOT / "examples" / "arithmetic_vllm.yaml").read_text())["inference"]["launch"]
ENVIRONMENT = {name: str(value) for name, value in LAUNCH["env"].items()}
WHOLE = ["--weight-transfer-config", json.dumps({"backend": TRANSFER})]
START_S = 240.0


@dataclass
class RunningVllm:
    """A server that somebody else started, as `inference.replicas` names it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def engine(self) -> psutil.Process:
        """The process that computes; the other one speaks HTTP."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))

    def wait(self) -> None:
        for _ in range(int(START_S * 5)):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=1).is_success:
                    return
            except httpx.TransportError:
                pass
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")


@contextmanager
def running_vllm(
    folder: Path, adapters: Path, *, dtype: str = "float32", max_loras: int = 0, model: Path = TINY_MODEL
) -> Iterator[RunningVllm]:
    """Not up yet: `wait`. Without `max_loras`, all its weights can be replaced."""
    port, log = free_port(), folder / f"vllm-{dtype}.log"
    command = [
        *(sys.executable, "-m", "tinkerscript.processes.with_parent"),
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
        *(["--enable-lora", "--max-lora-rank", "16", "--max-loras", str(max_loras)] if max_loras else WHOLE),
        "--enforce-eager",
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *LAUNCH["args"],
    ]
    mode = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if max_loras else {"VLLM_SERVER_DEV_MODE": "1"}
    environment = {**mode, ADAPTERS: str(adapters), **ENVIRONMENT}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield RunningVllm(f"http://127.0.0.1:{port}", process, log)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
