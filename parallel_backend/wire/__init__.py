"""Carries messages between ComfyUI's process and the ranks: protocol, payloads, link, heartbeat."""
