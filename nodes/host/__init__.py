"""The services that ComfyUI's process offers the ranks: its interrupts, memory manager, progress bars and settings."""
