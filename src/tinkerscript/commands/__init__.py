"""What the commands of `tinkerscript` do."""
