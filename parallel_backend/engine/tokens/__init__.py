"""The blocks of a module, and functions that cut and gather their tokens."""
