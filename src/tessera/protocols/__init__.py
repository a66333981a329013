"""Roles without I/O. They know vectors and index sets, never models."""
