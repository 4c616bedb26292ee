"""In which number format the engine multiplies matrices; weights and moments are float32 in any case."""

from __future__ import annotations

import torch

from tinkerscript.errors import EngineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16", "arm_bf16")
"""Processor features, as torch names them, with which bfloat16 is no slower than float32."""


def compute_dtype(name: str, device: str) -> torch.dtype:
    """`auto`: bfloat16 where `device` has it in hardware, else float32.

    Raises EngineError for another name than auto, float32 and bfloat16.
    """
    if name == "auto":
        return torch.bfloat16 if _has_bfloat16(torch.device(device)) else torch.float32
    if name not in DTYPES:
        raise EngineError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return device.type == "cpu" and any(capabilities.get(unit, False) for unit in BFLOAT16_UNITS)
