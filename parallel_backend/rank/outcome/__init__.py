"""The outcome of a rank's work: agreement between the ranks, errors and progress for the caller."""
