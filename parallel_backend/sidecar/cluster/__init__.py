"""The head's view of the other machines of a cluster."""
