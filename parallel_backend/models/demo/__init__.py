"""The demo model's parts for pictures of coloured shapes: text encoder and image coder. Pure torch."""
