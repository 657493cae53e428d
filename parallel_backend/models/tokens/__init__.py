"""Tables that say which arguments of a class's blocks are tokens."""
