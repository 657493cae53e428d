"""Reads the jobs of ComfyUI's process in a rank, and runs those over text encoders and VAEs."""
