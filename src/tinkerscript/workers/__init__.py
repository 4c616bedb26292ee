"""Ready-made workers over the client: a user's script, or an Inspect task."""

from tinkerscript.workers.process import WorkerOptions, run_worker
from tinkerscript.workers.script import load_rollout

__all__ = ["WorkerOptions", "load_rollout", "run_worker"]
