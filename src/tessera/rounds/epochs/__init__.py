"""Epochs of fixed groups as rounds of training: what members and the server of a group compute.

The protocol (chain, masks, certificates) is `protocols/epochs/`, which knows vectors and digests.
Here is what the vectors are: the union of a group's rows, once a period, then one update per epoch.
"""
