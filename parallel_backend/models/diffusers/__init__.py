"""diffusers' models behind the signature of ComfyUI's, as modules that the same engine drives."""
