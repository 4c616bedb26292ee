"""What the commands of `tinkerscript` do; `cli.py` parses their options."""
