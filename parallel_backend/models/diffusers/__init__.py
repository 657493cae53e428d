"""Flux.1: what its files hold, how a rank loads them into diffusers' transformer, and what its layers take."""
