"""Replicas of vLLM or SGLang that sample for a run: each version of its adapter is published and proved."""
