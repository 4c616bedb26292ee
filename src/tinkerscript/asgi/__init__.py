"""What all HTTP endpoints share: fast routes, refusals, the limit on request bodies, and model callers."""
