"""A module's blocks over the stages of a pipeline."""
