"""Moves of MX arrays between devices."""
