"""`python -m vllm.entrypoints.openai.api_server`, as far as our runs use it: the fake."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import uvicorn

from inference_fakes import Faults
from peft_vllm import PeftVllm
from tinkerscript.vllm_plugin import ADAPTERS, ADAPTERS_TOKEN, WeightSource


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "served-model-name", "host"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-lora-rank", "max-loras", "max-cpu-loras"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--tensor-parallel-size", type=int, choices=[1], required=True)
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs"], required=True)
    parser.add_argument("--generation-config", choices=["vllm"], required=True)
    parser.add_argument("--enable-lora", action="store_true", required=True)
    parser.add_argument("--enforce-eager", action="store_true", required=True)
    options = parser.parse_args()
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    torch.set_num_threads(1)
    faults = Faults(logprobs="processed", models=(options.served_model_name,), key=os.environ["VLLM_API_KEY"])
    source = WeightSource(os.environ[ADAPTERS], os.environ.get(ADAPTERS_TOKEN, ""))
    fake = PeftVllm(Path(options.model), source, faults)
    uvicorn.run(fake.app, host=options.host, port=options.port, log_level="info")


if __name__ == "__main__":
    main()
