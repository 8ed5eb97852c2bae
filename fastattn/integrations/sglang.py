"""SGLang's attention on CPUs.

sglang serve --model-path MODEL --device cpu --attention-backend fastattn --page-size 64
"""

from __future__ import annotations

import importlib
from typing import Any

VERSIONS = ("0.5.23",)


def make(runner: Any) -> Any:
    """The attention backend of SGLang 0.5.23 for a model, which SGLang's option makes.

    `--attention-backend fastattn` calls it, once fastattn is installed. Prompts, chunks of prompts
    and tokens run from SGLang's own cache, which is read in pages of `--page-size` tokens.

    Args:
        runner: SGLang's ModelRunner.

    Returns:
        An AttentionBackend of SGLang.

    Raises:
        ImportError: There is no SGLang, or it is of another version.
        NotImplementedError: The model, or an option, needs what fastattn does not do there: latent
            attention, a cache in another dtype or layout, speculative decoding, ranks that share a
            context, another device. Layers and batches raise likewise when they run.
    """
    try:
        sglang: Any = importlib.import_module("sglang")
    except ImportError as error:
        raise ImportError("sglang: got none, expected it: pip install sglang") from error
    if sglang.__version__ not in VERSIONS:
        raise ImportError(
            f"sglang: got {sglang.__version__}, expected {' or '.join(VERSIONS)}, whose interface "
            "this fastattn knows: install one of these or a newer fastattn, or choose another "
            "--attention-backend"
        )
    from .sglang_backend import Backend  # imports sglang

    return Backend(runner)
