"""Secure sums: dense and row by row, over a group that the parameters name.

Bonawitz et al. 2017 (ia.cr/2017/281), semi-honest and against an active server; the sparse graph of
Bell et al. 2020 (ia.cr/2020/704) for who holds shares and who masks the dense part. The flow, with
the names used in papers and code, is in `docs/protocols/secagg.md`.
"""
