"""What is promised about index sets, and what it has cost so far; no models, no torch."""
