"""`python -m sglang.launch_server`, as far as our runs use it: the fake, with adapters applied by PEFT."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import uvicorn

from inference_fakes import Faults
from peft_sglang import PeftSglang


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "served-model-name", "host", "api-key", "max-lora-rank"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-loras-per-batch", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--lora-target-modules", nargs="+", required=True)
    parser.add_argument("--device", choices=["cpu"], required=True)
    parser.add_argument("--tensor-parallel-size", type=int, choices=[1], required=True)
    parser.add_argument("--sampling-defaults", choices=["openai", "model"], required=True)
    parser.add_argument("--enable-lora", action="store_true", required=True)
    parser.add_argument("--enable-metrics", action="store_true", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults = Faults(logprobs="processed", models=(options.served_model_name,), key=options.api_key)
    fake = PeftSglang(Path(options.model_path), faults)
    uvicorn.run(fake.app, host=options.host, port=options.port, log_level="info")


if __name__ == "__main__":
    main()
