"""ComfyUI's own modules in the ranks: loaded by ComfyUI's detection, split by a table of their blocks."""
