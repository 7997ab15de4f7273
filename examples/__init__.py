"""Runnable examples: each works on two CPU processes, in minutes, without a download."""
