"""Do two scripts train the same? Any script, unchanged: hooks of torch record it, and two records are compared."""
