"""The tests; their folders mirror the packages they test."""
