"""Local training of clients, one after the other or vectorised, with or without noise."""
