"""The implementations of the `tinkerscript` commands; `cli` parses their options."""
