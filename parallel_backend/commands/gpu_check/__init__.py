"""`doctor --gpu`: a list of checks for the first minutes on a GPU; a crash does not stop it (docs/gpu-check.md)."""
