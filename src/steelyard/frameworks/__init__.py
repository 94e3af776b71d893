"""What other people's systems accept, print and allocate: one folder each, with the same rooms in each."""
