"""Services of ComfyUI's process for the ranks: its interrupts, memory manager, progress bars and settings."""
