"""Calls of a module's blocks on one rank's tokens, torch.compile for them, and the step cache."""
