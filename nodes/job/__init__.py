"""How a job leaves ComfyUI's process: where it is caught, what goes with it, and how it is sent."""
