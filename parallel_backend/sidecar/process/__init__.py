"""One rank's process: its environment, its device's lock, its end."""
