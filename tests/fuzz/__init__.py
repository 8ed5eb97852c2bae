NUMBERS = 1_000_000  # per seed
