"""The model endpoint that rollout programs call, which records every sampled token."""
