"""How a rank's work ended, in words that a caller reads."""
