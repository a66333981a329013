"""Leader, helper and clients as processes: keys, journals, links, and the only sockets."""
