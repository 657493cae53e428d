"""Routes for ComfyUI's page and other programs, over HTTP and the websocket."""
