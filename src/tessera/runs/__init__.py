"""A training into a folder: set-up, rounds, evaluation, export, recommendations."""
