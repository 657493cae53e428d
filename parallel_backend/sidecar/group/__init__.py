"""A group of ranks: started, watched, asked, restarted."""
