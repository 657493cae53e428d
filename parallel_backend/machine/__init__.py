"""This machine: GPU models, the links between devices, shares of work, and the cache folder for measurements."""
