"""How far the table counts for a ComfyUI: what was proven, and on which sources."""
