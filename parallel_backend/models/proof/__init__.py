"""Decides which entries of the model table hold for a ComfyUI, from proofs that were made on its sources."""
