"""Stands for SGLang's package in a process that a run starts."""
