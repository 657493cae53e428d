"""Samples one diffusion job on several devices: strategies, the sidecar, and the ranks. Imports nothing of ComfyUI."""
