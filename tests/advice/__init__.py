"""Tests that what errors tell users to write can be written, and is right."""
