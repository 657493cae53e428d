"""Tells people what a run did and took: report, badge, panel rows, and the comparison of two runs."""
