"""The embedded engine: samples and trains a Hugging Face causal language model with Tinker's methods.

Nothing is imported here, so that `tinkerscript.engine.tiny` can be located without torch.
"""
