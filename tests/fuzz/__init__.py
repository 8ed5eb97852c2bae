NUMBERS = 1_000_000  # of a seed
