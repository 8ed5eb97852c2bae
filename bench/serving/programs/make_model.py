"""A program for the Python of vLLM's environment: a small model with random weights, on disk.

Its arguments are a folder, the name of a class of transformers, its configuration in JSON, and a
dtype. Words of its tokenizer are w0, w1, ….
"""

import json
import sys

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers


def main(folder, name, settings, dtype):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    settings = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2) | json.loads(settings)
    model = kind(kind.config_class(**settings))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    words = {f"w{i}": i for i in range(settings["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(unk_token="w3", pad_token="w0", bos_token="w1", eos_token="w2")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
