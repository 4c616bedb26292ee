"""Rollouts in the forms of other trainers. A converter that would lose something raises and names it."""
