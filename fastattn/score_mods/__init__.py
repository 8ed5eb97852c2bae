"""score_mod and mask_mod of flex_attention as data: traced once, run by any reader."""
