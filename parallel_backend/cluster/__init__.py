"""Machines that lend their devices: certificates, the encrypted link to each of them, and what travels over it."""
