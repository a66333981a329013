"""Private writing of rows: two shares of the sum over a cohort, and of no single client's rows.

Cui et al. 2022, section 4 (SSA), with rows as mega-elements (section 6).
"""
