"""How a job becomes bytes and tensors, and a job again."""
