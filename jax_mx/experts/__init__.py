"""Mixtures of experts: the layer, how tokens move between devices, published checkpoints."""
