"""Replicas of vLLM that sample for a run: each version of its adapter is published and proved."""
