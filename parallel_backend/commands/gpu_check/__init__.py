"""`doctor --gpu`: the first minutes on a GPU as a list of checks, each survived, in one report (docs/gpu-check.md)."""
