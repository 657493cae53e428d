"""A benchmark of strategies on the user's own model and devices, with a result file that can be shared."""
