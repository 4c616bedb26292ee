"""What all HTTP faces share: fast routes, refusals, limits."""
