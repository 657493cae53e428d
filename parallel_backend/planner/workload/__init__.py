"""The description of a job for planning, and the memory that it needs."""
