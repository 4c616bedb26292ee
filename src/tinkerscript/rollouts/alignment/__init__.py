"""Token alignment: is what trains exactly what was sampled?"""

from tinkerscript.rollouts.alignment.checks import ERRORS, WARNINGS, find_errors, find_warnings
from tinkerscript.rollouts.alignment.diagnosis import Contradictions, Finding, Gap, Pair, diagnose
from tinkerscript.rollouts.alignment.report import AlignmentReport, constrained_share, explain

__all__ = [
    "ERRORS",
    "WARNINGS",
    "AlignmentReport",
    "Contradictions",
    "Finding",
    "Gap",
    "Pair",
    "constrained_share",
    "diagnose",
    "explain",
    "find_errors",
    "find_warnings",
]
