"""Flux.1 with diffusers: reads its files, loads them into diffusers' transformer in a rank, and counts its memory."""
