"""Machines that lend their devices: certificates, the encrypted connection to each, and the frames on it."""
