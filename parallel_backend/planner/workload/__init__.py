"""A job as planning sees it, and the memory that it takes."""
