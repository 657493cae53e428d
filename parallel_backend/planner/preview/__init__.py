"""What a setting will do, told before a run."""
