"""Mixture of experts in MX: token groups and a layer."""
