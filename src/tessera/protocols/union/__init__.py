"""Private set union over a secure sum: encodings of id sets whose sum shows the union only."""
