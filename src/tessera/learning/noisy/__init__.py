"""Training with noise in every step, for privacy per example or per person.

steps.py   what a plan says about it, batches, and who is clipped together
client.py  one client's state: rows that owe noise, and a step's sums made noisy
factors.py factors at shops, per person: rows of one person each are free
local.py   the reference: one client and one group after the other, for any module

`learning/cohort/noisy.py` does the same for all groups of a batch at once.
"""
