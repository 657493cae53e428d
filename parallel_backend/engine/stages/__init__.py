"""A module's blocks, split over the stages of a pipeline."""
