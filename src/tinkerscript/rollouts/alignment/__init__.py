"""The alignment report: is what would train exactly what was sampled?

`errors` and `warnings` look at one sequence, `siblings` at a group, `comparison` at the trainer's log
probabilities beside the sampler's; `diagnosis` says in which way they differ, `report` counts over steps and
the whole run, `explain` says it in words.
"""

from tinkerscript.rollouts.alignment.checks import ERRORS, WARNINGS, find_errors, find_warnings
from tinkerscript.rollouts.alignment.report import AlignmentReport

__all__ = ["ERRORS", "WARNINGS", "AlignmentReport", "find_errors", "find_warnings"]
