"""This machine: cards, links, the paths between them, shares of devices, and the folder that keeps what it showed."""
