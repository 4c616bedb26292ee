"""An Inspect task: samples, a solver, and a scorer whose score is the reward. Replace each with your own."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def sums(split: str = "train") -> Task:
    """Addition; pairs whose sum is a multiple of 5 are held out. The last number of a reply is the answer."""
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 60) if ((a + b) % 5 == 0) == (split == "test")]
    samples = [Sample(input=f"What is {a}+{b}?", target=str(a + b)) for a, b in pairs]
    return Task(dataset=samples, solver=generate(), scorer=match(numeric=True))
