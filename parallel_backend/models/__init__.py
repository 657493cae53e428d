"""Models on the ranks: how files become modules, what they cost, and which of their tensors are tokens."""
