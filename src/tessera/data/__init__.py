"""Data of many users, one part per client: synthetic, or read from files."""
