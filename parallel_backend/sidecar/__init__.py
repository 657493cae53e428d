"""ComfyUI's side of the ranks: start them, talk to them, keep them warm, restart and end them; tells events."""
