"""Attacks on ratings: from what a client shares, masked or not, back to what it thinks of items."""
