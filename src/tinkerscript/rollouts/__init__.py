"""From recorded calls to training sequences: `Call` -> merge -> `Rollout` -> `RolloutGroup`."""
