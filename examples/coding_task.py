"""Small coding problems as an ordinary Inspect AI task: hidden tests check the submitted function.

    load_environment(coding_task, renderer, env_type="multi_turn", sandbox_type="docker")

The task's solver only asks the question. `env_type="multi_turn"` adds an agent with bash, python, and submit.
Under `inspect eval` the model gives a single answer, scored the same way. The tests run in the sample's
sandbox.
"""

from __future__ import annotations

from typing import NamedTuple

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, system_message
from inspect_ai.util import sandbox

SYSTEM = "You write Python. Test your function with the tools, then submit its code and nothing else."
TEST_TIMEOUT_S = 30


class Problem(NamedTuple):
    """A function to write and the tests that it must pass."""

    name: str
    behavior: str
    tests: str


PROBLEMS = (
    Problem(
        "is_palindrome",
        "whether the text s reads the same backwards; case and spaces do not count",
        "assert is_palindrome('Never odd or even') and not is_palindrome('ab')",
    ),
    Problem(
        "count_vowels",
        "how many of the letters of the text s are vowels (aeiou, either case)",
        "assert count_vowels('Education') == 5 and count_vowels('xyz') == 0",
    ),
    Problem(
        "reverse_words",
        "the words of the text s in reverse order, one space between them",
        "assert reverse_words('a  b c') == 'c b a' and reverse_words('') == ''",
    ),
    Problem(
        "sum_digits",
        "the sum of the decimal digits of the number s, which is not negative",
        "assert sum_digits(1234) == 10 and sum_digits(0) == 0",
    ),
    Problem(
        "longest_run",
        "the length of the longest run of equal neighbours in the list s",
        "assert longest_run([1, 1, 2, 2, 2]) == 3 and longest_run([]) == 0",
    ),
    Problem(
        "is_prime",
        "whether the number s is prime",
        "assert [n for n in range(20) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19]",
    ),
    Problem(
        "transpose",
        "the rows of the matrix s (a list of lists of one length) as columns",
        "assert transpose([[1, 2], [3, 4], [5, 6]]) == [[1, 3, 5], [2, 4, 6]] and transpose([]) == []",
    ),
    Problem(
        "gcd_all",
        "the greatest common divisor of the numbers in the list s, which is not empty",
        "assert gcd_all([12, 18, 30]) == 6 and gcd_all([7]) == 7",
    ),
)


@scorer(metrics=[accuracy()])
def passes_tests() -> Scorer:
    """Scores 1 if the answer passes the sample's tests in its sandbox."""

    async def score(state: TaskState, target: Target) -> Score:
        code = _without_fence(state.output.completion)
        await sandbox().write_file("solution.py", f"{code}\n\n{target.text}\n")
        try:
            run = await sandbox().exec(["python3", "solution.py"], timeout=TEST_TIMEOUT_S)
        except TimeoutError:
            return Score(value=INCORRECT, answer=code, explanation=f"ran longer than {TEST_TIMEOUT_S} s")
        value = CORRECT if run.success else INCORRECT
        return Score(value=value, answer=code, explanation=run.stderr or "the tests passed")

    return score


def _without_fence(text: str) -> str:
    """The answer without the Markdown fence around it, if there is one."""
    lines = text.strip().splitlines()
    if len(lines) >= 2 and lines[0].startswith("```") and lines[-1] == "```":
        lines = lines[1:-1]
    return "\n".join(lines)


@task
def coding_task() -> Task:
    """Write a Python function. The score is 1 if it passes tests that the model cannot see."""
    samples = [
        Sample(
            id=problem.name,
            input=f"Write a Python function `{problem.name}(s)` that returns {problem.behavior}.",
            target=problem.tests,
        )
        for problem in PROBLEMS
    ]
    return Task(
        dataset=MemoryDataset(samples, name="coding"),
        solver=[system_message(SYSTEM), generate()],
        scorer=passes_tests(),
        sandbox="docker",
    )
