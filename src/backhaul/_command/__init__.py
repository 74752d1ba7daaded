"""The command `backhaul`: one module per subcommand, imported when it is used."""
