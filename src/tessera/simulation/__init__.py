"""Everybody in one process: federation, simulator, dropouts and faults, recorded views."""
