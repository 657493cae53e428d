"""Shows what a run did and how long it took: report, badge, panel rows, and the comparison of two runs."""
