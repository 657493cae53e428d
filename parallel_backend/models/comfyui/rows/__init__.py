"""ComfyUI's VAEs and UNets in rows of pixels."""
