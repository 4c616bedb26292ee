"""vLLM replicas that sample for a run. Each version of its weights is published to them and proved."""
