"""Which arguments of a class's blocks are tokens, as data."""
