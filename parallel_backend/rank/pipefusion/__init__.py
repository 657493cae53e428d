"""Image patches through the stages of a pipeline, within a job."""
