"""Data of many people, one part per client: made up here, or read from files."""
