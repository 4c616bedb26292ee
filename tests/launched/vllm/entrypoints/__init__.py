"""Stands for vLLM's package in a process that a run starts."""
