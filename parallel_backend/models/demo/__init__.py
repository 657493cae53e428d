"""The demo model's world of coloured shapes: captions, drawings, text encoder, image coder, judge. Pure torch."""
