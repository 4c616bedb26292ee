"""The link between trainer and server: messages, framing, both ends, keys, and sampling over the link."""
