"""Predicted time of a strategy, from work, cards and links."""
