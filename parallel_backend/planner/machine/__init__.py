"""What this machine has: cards, links, the paths between them, shares of devices."""
