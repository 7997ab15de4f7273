"""Measurements, and what they print; each file is a script."""
