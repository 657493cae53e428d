"""Bytes of diffusers' Flux.1 on a rank, by counting."""
