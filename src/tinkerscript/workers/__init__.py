"""Ready-made workers over the client: a user's script, or an Inspect task."""

from tinkerscript.workers.worker import WorkerOptions, load_rollout, run_worker

__all__ = ["WorkerOptions", "load_rollout", "run_worker"]
