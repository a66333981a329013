"""Federated learning over large embedding tables, each client touching only its own rows.

Importing this package loads nothing but the exception tree: every layer below it starts on its own,
so that a client that only takes sums never pays for what trains a model.
"""

from __future__ import annotations

from tessera.errors import (
    ConfigError,
    PeerError,
    RoundAborted,
    ServerFault,
    TesseraError,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "ConfigError",
    "PeerError",
    "RoundAborted",
    "ServerFault",
    "TesseraError",
    "__version__",
]
