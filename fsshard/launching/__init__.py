"""How do ranks start and end? Launchers, one context, a pool for tests, and the diagnosis of ranks that hang."""
