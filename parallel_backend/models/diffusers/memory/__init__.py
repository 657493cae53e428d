"""Counts the bytes that diffusers' Flux.1 takes on a rank: weights and activations."""
