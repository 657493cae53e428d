"""PipeFusion in a job: image patches flow through the stages of a pipeline."""
