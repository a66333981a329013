"""One round as a composition of protocols, privacy and learning, still without I/O."""
