"""Turns a job into bytes and tensors, and back into a job."""
