"""The decoder of Flux's and Stable Diffusion's AutoencoderKL: its tensors' names, and the module of a rank."""
