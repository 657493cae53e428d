"""The demo model's parts for pictures of coloured shapes: captions, text encoder, image coder, preview. Pure torch."""
