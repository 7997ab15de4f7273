"""What does the command ``fsshard`` do? One file per subcommand."""
