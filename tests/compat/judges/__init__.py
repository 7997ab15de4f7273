"""Tests of the libraries that we stand in front of, from a checkout of theirs, with ours put in."""
