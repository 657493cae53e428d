"""ComfyUI's own modules in the ranks: loaded by its detection, shared out by a table of its blocks."""
