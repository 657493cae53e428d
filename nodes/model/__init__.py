"""The MODEL whose weights are in the ranks, and the samplers that run there: ComfyUI's arguments in, requests out."""
