"""Layers of a few tokens: several products in one call."""
