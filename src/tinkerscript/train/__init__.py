"""The trainer: GRPO over episodes that ordinary programs run. Start reading at `loop.py`."""
