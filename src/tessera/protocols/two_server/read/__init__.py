"""Private retrieval of rows: each server sees keys, and neither learns which rows they select.

Cui et al. 2022, section 4 (PSR). Lossless: a row comes back as the bytes that the servers hold.
"""
