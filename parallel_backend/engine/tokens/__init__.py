"""Finds the blocks of a module, and cuts and gathers their tokens."""
