"""One rank's process: its environment, the lock on its device, and its end."""
