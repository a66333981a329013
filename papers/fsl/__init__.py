"""Two servers: Cui et al. 2022."""
