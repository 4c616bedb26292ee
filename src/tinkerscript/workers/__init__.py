"""Ready-made workers that use the client: for a user's script, or for tasks of any kind."""

from tinkerscript.workers.base_task import EpisodeModel, Task, named_scores
from tinkerscript.workers.worker import WorkerOptions, load_rollout, run_worker

__all__ = ["EpisodeModel", "Task", "WorkerOptions", "load_rollout", "named_scores", "run_worker"]
