"""vLLM replicas that sample for a run, and the proof of the versions that they load."""
