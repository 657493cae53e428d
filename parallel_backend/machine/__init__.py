"""This machine: cards, links, the paths between them, shares of devices."""
