"""Reading weights: every tensor of the files exactly once, every parameter filled."""
