"""Mixtures of experts: the layer, and how tokens move between devices."""
