"""Model families: checkpoint tensors to diffusers modules, and the token layout each family uses."""
