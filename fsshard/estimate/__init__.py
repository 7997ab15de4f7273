"""Memory and traffic of a plan, known before the launch."""
