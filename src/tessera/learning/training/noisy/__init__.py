"""Training with noise in every step, for privacy per row, example or person.

steps.py   what a plan says about it, batches, and who is clipped together
client.py  one client's state: rows that owe noise, and a step's sums made noisy
clipped.py the same without noise, for what others add to the sum
row_cut.py which examples a row stays in, where privacy is per row
factors.py factors at shops, per person: rows of one person each are free
local.py   the reference: one client and one group after the other, for any module

`learning/training/vectorised/noisy.py` does the same for all groups of a batch at once.
"""
