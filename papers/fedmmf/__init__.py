"""Ratings with personalised masks: Yang et al. 2021."""
