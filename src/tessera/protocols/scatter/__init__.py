"""Private writing of rows: two shares of a sum over a cohort, and of nobody's own.

Cui et al. 2022, section 4 (SSA), with rows as mega-elements (section 6).
"""
