"""Sums over a fixed group that waits for all its members: one message per client and epoch.

All g members mask with each other and nothing opens over fewer: there are no shares and no
unmasking, and a member comes whenever it can. What members must agree on is in a hash chain
(`messages.py`) that their masks and signatures name. The flow is in `docs/protocols/epochs.md`.
"""
