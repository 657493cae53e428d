"""What a run did and took, told to people: its report, badge, panel rows, and the comparison of two runs."""
