"""A search over plans, with the estimator as judge."""
