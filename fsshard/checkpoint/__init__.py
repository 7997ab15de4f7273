"""Portable checkpoints: any engine, any world size, no pickle; each is complete or it is none."""
