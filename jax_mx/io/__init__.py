"""Checkpoints: files of our own, and those that other libraries write."""
