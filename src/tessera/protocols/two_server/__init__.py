"""What private retrieval and private writing of rows share: two servers that do not collude.

The leader is the server that clients talk to; the helper is reached through it, in boxes sealed to
the helper's pinned key. Cui et al. 2022 (*Practical and Light-weight Secure Aggregation for
Federated Submodel Learning*), section 4; where we leave it, and why, is in
`docs/protocols/two-servers.md`.
"""
