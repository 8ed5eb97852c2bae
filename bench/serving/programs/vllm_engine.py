"""A program for the Python of vLLM's environment: an engine that answers lines of JSON.

Its argument is JSON, the arguments of vllm.LLM. A line of stdin is {"prompts": [[token, ...], ...],
"tokens": n}, or only prompts for a model that embeds. A line of stdout, after MARK, is {"tokens":
[...], "seconds": s} or {"embeddings": [...]}. The first one, {}, says that the engine is ready.
"""

import json
import sys
import time

MARK = "ANSWER "


def answer(found):
    print(MARK + json.dumps(found), flush=True)


def main():
    from vllm import LLM, SamplingParams

    engine = LLM(**json.loads(sys.argv[1]))
    answer({})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": x} for x in asked["prompts"]]
        if "tokens" not in asked:
            found = engine.embed(prompts, use_tqdm=False)
            answer({"embeddings": [x.outputs.embedding for x in found]})
            continue
        greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
        begin = time.perf_counter()
        found = engine.generate(prompts, greedy, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = [list(x.outputs[0].token_ids) for x in found]
        answer({"tokens": tokens, "seconds": seconds})


if __name__ == "__main__":  # vLLM spawns processes that import this file
    main()
