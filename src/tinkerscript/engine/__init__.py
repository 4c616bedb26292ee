"""The embedded engine: samples and trains a Hugging Face causal language model with Tinker's methods.

This imports nothing, so that `tinkerscript.engine.tiny` is found without torch.
"""
