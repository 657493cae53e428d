"""Files of lines: what happened to the ranks, and which prompts wait."""
