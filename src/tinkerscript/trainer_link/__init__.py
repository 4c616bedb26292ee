"""The link between trainer and server: messages, framing, the two ends, keys, and sampling over it."""
