"""Measures strategies side by side on the user's own model and devices, and writes what can be shared."""
