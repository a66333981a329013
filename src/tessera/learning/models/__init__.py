"""Recommenders, one readable file each: ordinary modules that take a batch of named fields."""
