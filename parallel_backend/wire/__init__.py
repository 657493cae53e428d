"""The traffic between ComfyUI's process and the ranks: messages, payloads, the link, the heartbeat."""
