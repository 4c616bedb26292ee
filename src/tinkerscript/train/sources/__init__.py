"""Sources of episodes: clients behind the interchange server, or solvers in the trainer's own process."""
