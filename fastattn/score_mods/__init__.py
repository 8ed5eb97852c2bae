"""Functions of scores and indices (score_mod, mask_mod) as data: traced, evaluated, recognised."""
