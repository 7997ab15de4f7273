"""Other people's front doors. Each package below imports its vendor; this one imports nothing."""
