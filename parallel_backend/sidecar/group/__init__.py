"""A group of ranks: how it is started, watched, sent requests and restarted."""
