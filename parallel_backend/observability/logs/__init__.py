"""Log files with one line per record: events of the ranks, and accepted prompts."""
