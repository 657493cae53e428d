"""What ComfyUI's page and other programs ask over HTTP and the websocket."""
