"""Checks that ranks run: of the links, of model classes against one process, and of the GPUs."""
