"""Decides which strategy a job runs under, by rules, memory, measurements and trials."""
