"""vLLM replicas that sample for a run: each version of its LoRA adapter is published to them, and proved."""
