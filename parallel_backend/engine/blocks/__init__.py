"""Blocks of a module on one rank's tokens: called, compiled, cached."""
