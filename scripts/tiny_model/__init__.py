"""The parts of `scripts/build_tiny_model.py`: tokenizer, training chats, training, measurement."""
