"""What a rank holds and runs."""
