"""Previews the effect of settings before a run."""
