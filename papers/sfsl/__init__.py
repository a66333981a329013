"""Submodel learning: Niu et al. 2020."""
