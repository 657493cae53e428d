"""Where the nodes stand in the menu."""

CATEGORY = "parallel/testing"
