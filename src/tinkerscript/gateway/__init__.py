"""The model endpoint that rollout programs call, and the record of every token it sampled."""
