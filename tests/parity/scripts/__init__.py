"""Tests of fsshard/parity/scripts."""
