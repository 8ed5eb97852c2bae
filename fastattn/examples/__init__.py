"""Programs that use this package for a task, and check and print claims about the results.

    python -m fastattn.examples.attention_notebook   a notebook on attention, digit by digit
    python -m fastattn.examples.char_lm              a language model: torch and fused, side by side
    python -m fastattn.examples.serve                continuous batching over a paged cache
    python -m fastattn.examples.translate            an encoder-decoder that reads number words
    python -m fastattn.examples.digits_vit           a vision Transformer, converted in place
    python -m fastattn.examples.meanflow             a one-step flow, trained with attention's jvp
    python -m fastattn.examples.complexity           the paper's table of complexities, measured
    python -m fastattn.examples.flex_gallery         functions of flex_attention, drawn and timed
    python -m fastattn.examples.long_context         a sequence split over ranks, trained as on one
    python -m fastattn.examples.sparse_lm            rows that select their keys, beside all keys

Each takes --plot to save a picture, downloads nothing, and exits with status 1 if a claim fails.
"""
