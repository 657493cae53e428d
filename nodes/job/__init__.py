"""The way of a job out of ComfyUI's process: where it is caught, what is sent with it, and how."""
