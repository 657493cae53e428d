"""The measurements of this machine, and where they are kept."""
