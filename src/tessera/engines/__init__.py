"""The only clocks, sockets and processes."""
