"""The `tessera` command, one module per subcommand."""
