"""Jobs of ComfyUI's process as a rank reads them, and those that need no diffusion model."""
