"""Checks that a rank runs: links, classes against one process, the GPU check."""
