"""Programs that do real work with this package and print what they proved.

    python -m fastattn.examples.attention_notebook   the notebook on attention, digit by digit
    python -m fastattn.examples.char_lm              a language model: torch and fused, side by side
    python -m fastattn.examples.serve                requests that come and go, over caches in pages
    python -m fastattn.examples.translate            an encoder-decoder that reads number words
    python -m fastattn.examples.digits_vit           a vision Transformer, converted in place
    python -m fastattn.examples.meanflow             a flow in one step, trained by attention's jvp
    python -m fastattn.examples.complexity           the paper's table of complexities, measured
    python -m fastattn.examples.long_context         a sequence cut over ranks, trained as on one

Each takes --plot to save a picture, needs no download, and ends with status 1 if a claim fails.
"""
