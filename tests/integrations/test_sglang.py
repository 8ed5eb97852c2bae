"""SGLang's attention on fastattn.

Fast tests give the plugin batches as SGLang makes them, without SGLang, and compare with the
float64 reference. Slow ones run models with random weights in SGLang, where `python -m bench
engines --install sglang-engine` has installed it: tokens are those of its torch_native backend.
"""

import random
from types import SimpleNamespace

import pytest
import torch

import fastattn_plugins
from bench.serving.engine import environment, make_model, pair
from fastattn import reference
from fastattn.integrations import sglang as plugin
from tests.integrations.serving_stand_ins import ForwardMode, Pool, SGLangType, WindowPool, sglang

__all__ = ["sglang"]  # a fixture

H, HK, D, PAGE, SIZE = 4, 2, 32, 16, 160
ROWS, KEYS = (1, 7, 20), (45, 7, 33)  # a new token, a whole prompt, the end of a prompt
NO_SPECULATION = SimpleNamespace(is_speculative=lambda: False)


def runner(pool, page=PAGE, **more):
    """SGLang's ModelRunner: requests are rows 2, 0 and 3 of the table of tokens."""
    draw = torch.Generator().manual_seed(0)
    pages = 1 + torch.randperm(SIZE // page, generator=draw)
    tokens = (pages[:, None] * page + torch.arange(page)).flatten()
    table = torch.zeros(4, 48, dtype=torch.int32)
    for place, request in enumerate((2, 0, 3)):
        table[request] = tokens[48 * place : 48 * place + 48]
    given = dict(device="cpu", page_size=page, use_mla_backend=False, token_to_kv_pool=pool)
    given |= dict(req_to_token_pool=SimpleNamespace(req_to_token=table))
    return SimpleNamespace(**given | dict(spec_algorithm=NO_SPECULATION) | more)


def batch(model, mode=ForwardMode.MIXED, **more):
    """SGLang's ForwardBatch. In decoding each request has its last row alone."""
    rows = (1, 1, 1) if mode == ForwardMode.DECODE else ROWS
    table, requests = model.req_to_token_pool.req_to_token, torch.tensor([2, 0, 3])
    slots = [table[i, n - m : n] for i, m, n in zip(requests, rows, KEYS)]
    given = dict(forward_mode=mode, req_pool_indices=requests, seq_lens=torch.tensor(KEYS))
    given |= dict(encoder_lens=None, spec_info=None, out_cache_loc=torch.cat(slots).long())
    given["extend_seq_lens"] = (
        None if mode == ForwardMode.DECODE else torch.tensor(rows, dtype=torch.int32)
    )
    return SimpleNamespace(**given | more)


def layer(**more):
    """SGLang's RadixAttention."""
    given = dict(tp_q_head_num=H, qk_head_dim=D, v_head_dim=D, scaling=0.3, layer_id=0)
    given |= dict(logit_cap=0.0, sliding_window_size=-1, is_cross_attention=False, use_irope=False)
    given |= dict(pos_encoding_mode="NONE", logit_capping_method="tanh", xai_temperature_len=-1)
    return SimpleNamespace(**given | dict(attn_type=SGLangType.DECODER) | more)


def check(model, one, mode=ForwardMode.MIXED, causal="bottom_right", Dv=D, sinks=None, **wanted):
    """Run a step after other tokens were stored, and compare its rows with the reference."""
    torch.manual_seed(0)
    pool, table = model.token_to_kv_pool, model.req_to_token_pool.req_to_token
    for x in (pool.get_key_buffer(one.layer_id), pool.get_value_buffer(one.layer_id)):
        x.normal_()
    step = batch(model, mode)
    T = len(step.out_cache_loc)
    q, k, v = torch.randn(T, H * D), torch.randn(T, HK, D), torch.randn(T, HK, Dv)
    backend = plugin.make(model)
    backend.init_forward_metadata(step)
    function = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
    out = function(q, k, v, one, step, sinks=sinks)
    assert out.shape == (T, H * Dv)
    first = 0
    for request, n in zip(step.req_pool_indices, KEYS):
        rows = 1 if mode == ForwardMode.DECODE else ROWS[(2, 0, 3).index(request)]
        tokens = table[request, :n].long()
        if isinstance(pool, WindowPool) and pool.layers_mapping[one.layer_id][1]:
            tokens = pool.numbers[tokens]
        keys, values = (
            x(one.layer_id)[tokens].transpose(0, 1)[None].double()
            for x in (pool.get_key_buffer, pool.get_value_buffer)
        )
        assert keys[0, :, n - rows :].equal(k[first : first + rows].transpose(0, 1).double())
        its = q[first : first + rows].view(rows, H, D).transpose(0, 1)[None].double()
        right = reference.attention(
            *(its, keys, values),
            scale=0.3,
            causal=causal,
            sinks=None if sinks is None else sinks.double(),
            **wanted,
        )
        found = out[first : first + rows].view(rows, H, Dv).transpose(0, 1)[None]
        torch.testing.assert_close(found.double(), right, atol=2e-5, rtol=2e-5)
        first += rows


def pool(page=PAGE, Dv=D, **more):
    return Pool(SIZE, page, HK, D, Dv, **more)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.DECODE], ids=lambda x: x.name)
@pytest.mark.parametrize("page", [1, PAGE])
def test_a_layer(page, mode, sglang):
    check(runner(pool(page), page), layer(), mode)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda x: x.name)
def test_features_of_layers(mode, sglang):
    model = runner(pool())
    check(model, layer(sliding_window_size=4), mode, window=(4, None))
    check(model, layer(logit_cap=3.0), mode, softcap=3.0)
    check(model, layer(), mode, sinks=SINKS)
    check(model, layer(), mode, sinks=SINKS)
    check(runner(pool(Dv=48)), layer(v_head_dim=48), mode, Dv=48)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=lambda x: x.name)
def test_windows_with_a_pool_of_their_own(mode, sglang):
    """Tokens that no window reaches have no number there."""
    numbers = torch.arange(SIZE + PAGE).view(-1, PAGE).flip(0).flatten()
    model = runner(WindowPool(SIZE, PAGE, HK, D, D, numbers=numbers))
    check(model, layer(), mode)
    check(model, layer(layer_id=1, sliding_window_size=4), mode, window=(4, None))
    first = model.req_to_token_pool.req_to_token[2, :PAGE]  # 45 keys, a row, a window of 5
    numbers[first.long()] = -1
    backend, step = plugin.make(model), batch(model, mode)
    backend.init_forward_metadata(step)
    q, k = torch.randn(len(step.out_cache_loc), H, D), torch.randn(len(step.out_cache_loc), HK, D)
    out = backend.forward_extend(q, k, k, layer(layer_id=1, sliding_window_size=4), step)
    assert out.isfinite().all()


def test_an_encoder(sglang):
    one = layer(attn_type=SGLangType.ENCODER_ONLY)
    check(runner(pool()), one, ForwardMode.EXTEND, causal=False)


def test_keys_of_another_layer_and_no_step(sglang):
    """Layers may share the keys of an earlier one; an idle rank has no batch."""
    model = runner(pool())
    model.token_to_kv_pool.k.normal_()
    before = model.token_to_kv_pool.k.clone()
    backend, step = plugin.make(model), batch(model)
    backend.init_forward_metadata(step)
    assert backend.forward_extend(torch.randn(28, H * D), None, None, layer(), step).shape[0] == 28
    k = torch.randn(28, HK, D)
    backend.forward_extend(torch.randn(28, H * D), k, k, layer(), step, save_kv_cache=False)
    assert model.token_to_kv_pool.k.equal(before)
    backend.init_forward_metadata(batch(model, ForwardMode.IDLE))
    assert backend.forward_metadata is None and not backend.support_triton()


def test_the_pool_is_not_copied(sglang):
    model = runner(pool())
    rows = model.token_to_kv_pool.k
    pages = plugin.make(model)._pages("keys", rows, rows)
    assert pages.shape == (SIZE // PAGE + 1, PAGE, HK, D) and pages.data_ptr() == rows.data_ptr()


# ------------------------------------------------------------------------------------- what raises


def step(model, one=None, mode=ForwardMode.MIXED, kwargs=None, **more):
    backend = plugin.make(model)
    told = batch(model, **more) if mode == ForwardMode.MIXED else batch(model, mode, **more)
    backend.init_forward_metadata(told)
    q = torch.randn(28, H * D)
    return backend.forward_extend(q, None, None, one or layer(), told, **(kwargs or {}))


REFUSED = {
    "device": lambda: plugin.make(runner(pool(), device="cuda")),
    "latent": lambda: plugin.make(runner(pool(), use_mla_backend=True)),
    "speculative": lambda: plugin.make(
        runner(pool(), spec_algorithm=SimpleNamespace(is_speculative=lambda: True))
    ),
    "forward_mode": lambda: step(runner(pool()), mode=ForwardMode.TARGET_VERIFY),
    "encoder_lens": lambda: step(runner(pool()), encoder_lens=torch.ones(3)),
    "spec_info": lambda: step(runner(pool()), spec_info=object()),
    "an argument": lambda: step(runner(pool()), kwargs=dict(k_rope=torch.ones(1))),
    "dtype of the cache": lambda: step(runner(pool(dtype=torch.bfloat16))),
    "pages": lambda: step(runner(pool(PAGE - 1))),
    "cross attention": lambda: step(runner(pool()), layer(is_cross_attention=True)),
    "chunks": lambda: step(runner(pool()), layer(use_irope=True)),
    "positions": lambda: step(runner(pool()), layer(pos_encoding_mode="ALIBI")),
    "capping": lambda: step(runner(pool()), layer(logit_cap=3.0, logit_capping_method="other")),
    "temperature": lambda: step(runner(pool()), layer(xai_temperature_len=1024)),
    "bidirectional": lambda: step(
        runner(pool()), layer(attn_type=SGLangType.DECODER_BIDIRECTIONAL)
    ),
    "encoder's window": lambda: step(
        runner(pool()), layer(attn_type=SGLangType.ENCODER_ONLY, sliding_window_size=4)
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what, sglang):
    with pytest.raises(NotImplementedError, match=r": got .*, expected .*; choose another --att"):
        REFUSED[what]()


def test_another_version(sglang):
    sglang.__version__ = "0.5.24"
    with pytest.raises(ImportError, match=r"sglang: got 0.5.24, expected 0.5.23"):
        plugin.make(runner(pool()))


def test_the_option_gets_a_name(sglang):
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    fastattn_plugins.sglang()
    fastattn_plugins.sglang()
    assert ATTENTION_BACKEND_CHOICES == ["torch_native", "fastattn"]
    assert type(ATTENTION_BACKENDS["fastattn"](runner(pool()))).__name__ == "Backend"


# ------------------------------------------------------------------------------------ whole engines


@pytest.fixture
def whole():
    """SGLang is there."""
    if absent := environment("sglang").absent:
        pytest.skip(f"sglang-engine: {absent}")


SMALL = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=512)
SMALL |= dict(num_attention_heads=8, initializer_range=0.1, max_position_embeddings=2048)
SMALL |= dict(num_key_value_heads=2, head_dim=32)
MODELS = {
    "Llama": ("LlamaForCausalLM", SMALL, {}),
    "Llama, pages of a token": ("LlamaForCausalLM", SMALL, dict(page_size=1)),
    "Gemma 3, windows": ("Gemma3ForCausalLM", SMALL | dict(sliding_window=64), {}),
}
LENGTHS = 5, 37, 300, 129, 64


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens(name, whole, tmp_path):
    """Chunks of 128 rows. The second round finds its prompts in the cache."""
    kind, settings, arguments = MODELS[name]
    make_model(tmp_path / "model", kind, settings)
    given = dict(dtype="float32", context_length=1024, chunked_prefill_size=128) | arguments
    draw = random.Random(0)
    prompts = [[draw.randrange(4, 512) for _ in range(n)] for n in LENGTHS]
    with pair("sglang", tmp_path / "model", tmp_path, **given) as engines:
        wanted, found = ([x.ask(prompts, 24)["tokens"] for _ in range(2)] for x in engines)
        reached = ["Attention runs on fastattn." in x.log.read_text() for x in engines]
    assert reached == [False, True]
    assert found == wanted
    assert len({tuple(x) for x in wanted[0]}) == len(LENGTHS)
