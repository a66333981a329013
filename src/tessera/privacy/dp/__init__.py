"""Differential privacy: events, the ledger they are charged to, the numbers it gives."""
