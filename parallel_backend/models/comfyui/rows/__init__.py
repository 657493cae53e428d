"""ComfyUI's VAEs and UNets, computed in bands of rows."""
