"""Bytes and group vectors in, the same out; no roles, no rounds."""
