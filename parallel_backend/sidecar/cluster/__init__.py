"""The other machines of a cluster, as the head has them."""
