"""The implementations of the `tinkerscript` commands; `cli` parses their options.

They raise ConfigError for everything that the user must change.
"""
