"""Attacks on what was recorded of a run, each beside the number that its plan claims."""
