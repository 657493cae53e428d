"""ComfyUI's side of the ranks: starts them, talks to them, keeps them warm, restarts and ends them, emits events."""
