"""What the commands of `tinkerscript` do; `cli` parses their options."""
