"""Models over ranks have the losses and gradients of one rank: modules with sharded weights, and
wrappers (DDP, FSDP2, checkpoints, torch.compile) around attention over ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import distributed
from tests.distributed.test_dtensor import mesh_of

WIDTH, HEADS, KEY_HEADS, DIM, LENGTH, LAYERS = 32, 4, 2, 8, 21, 2
CLOSE = dict(rtol=1e-11, atol=1e-12)  # float64


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def results_of(four, count, function, *args):
    """The result of `function`, which all ranks must agree on."""
    found = four.results(count, in_float64, function.__name__, args)
    torch.testing.assert_close(found[1:], found[:1] * (len(found) - 1), **CLOSE)
    return found[0]


def in_float64(group, name, args):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    torch.compiler.reset()
    try:
        return globals()[name](group, *args)
    finally:
        torch.set_default_dtype(torch.float32)


def close(found, right):
    assert found.keys() == right.keys()
    for name, x in right.items():
        torch.testing.assert_close(
            found[name], x, msg=lambda message, name=name: f"{name}: {message}", **CLOSE
        )


# -- sharded weights -------------------------------------------------------------------------------


class Heads(nn.Module):
    """Attention with grouped heads; the number of heads follows from the shapes of the weights."""

    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * DIM) for _ in range(2))

    def forward(self, x, **about):
        q, k, v = (f(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = fastattn.attention(q, k, v, causal=True, dropout_p=0.3, seed=5, **about)
        return self.out(out.transpose(1, 2).flatten(2))


def wholes(found):
    return {
        name: x.full_tensor() if isinstance(x, tensor.DTensor) else x for name, x in found.items()
    }


def gradients_of(module, x, *losses):
    loss = module(x).square().sum() if not losses else losses[0]
    loss.backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return wholes({"loss": loss.detach()} | grads)


def heads_alone():
    torch.manual_seed(0)
    return gradients_of(Heads(), torch.randn(4, LENGTH, WIDTH))


def heads_cut(group, local):
    module, x = Heads(), torch.randn(4, LENGTH, WIDTH)
    plan = {name: ColwiseParallel(use_local_output=local) for name in ("q", "k", "v")}
    parallelize_module(module, mesh_of(group), plan | {"out": RowwiseParallel()})
    if not local:
        return gradients_of(module, x)
    place = fastattn.Place(head=group.rank() * HEADS // group.size())
    return gradients_of(module, x, module(x, place=place).square().sum())


@pytest.mark.parametrize("local", [False, True], ids=["DTensors", "local tensors and their place"])
def test_heads_by_parallelize_module(four, local):
    """Dropout on each rank is that of its heads in the whole call."""
    close(results_of(four, 2, heads_cut, local), heads_alone())


def items_cut(group):
    module, x = Heads(), torch.randn(4, LENGTH, WIDTH)
    mesh = mesh_of(group)
    tensor.distribute_module(module, mesh)
    return gradients_of(module, tensor.distribute_tensor(x, mesh, [tensor.Shard(0)]))


def test_items_by_distribute_module(four):
    """Dropout on each rank is that of its items in the whole call."""
    close(results_of(four, 2, items_cut), heads_alone())


def of_torch(module, x, **about):
    out, weights = module(x, x, x, **about)
    found = gradients_of(module, x, out.square().sum())
    found |= {"out": out.detach()} | ({} if weights is None else {"weights": weights.detach()})
    return wholes(found)


def module_cut(group, placement, weights):
    module, mesh = fastattn.MultiheadAttention(WIDTH, HEADS, batch_first=True), mesh_of(group)
    x = tensor.distribute_tensor(torch.randn(4, LENGTH, WIDTH), mesh, [placement])
    return of_torch(tensor.distribute_module(module, mesh), x, need_weights=weights)


@pytest.mark.parametrize("weights", [False, True], ids=["out alone", "weights"])
@pytest.mark.parametrize("placement", [tensor.Shard(0), tensor.Replicate()], ids=str)
def test_distribute_module_gives_what_stock_gives(four, placement, weights):
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    torch.manual_seed(0)
    module = type(module)(WIDTH, HEADS, batch_first=True)
    right = of_torch(module, torch.randn(4, LENGTH, WIDTH), need_weights=weights)
    close(results_of(four, 2, module_cut, placement, weights), right)


def test_a_distributed_module_runs_where_rows_are_cut(four):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    right = of_torch(module, torch.randn(4, LENGTH, WIDTH), need_weights=False)
    close(results_of(four, 2, module_cut, tensor.Shard(1), False), right)
    for error in four.run(2, in_float64, "module_cut", (tensor.Shard(1), True)):
        with pytest.raises(ValueError, match=r"got placements \[Shard.dim=2.\].*weights are asked"):
            raise error


# -- torch's context_parallel ----------------------------------------------------------------------


def inside(group):
    q, k, v = (torch.randn(1, HEADS, 16, DIM) for _ in range(3))
    right = fastattn.attention(q, k, v, causal=True)
    parts = [x.clone() for x in (q, k, v)]
    calls = [
        lambda: fastattn.attention(*parts, causal=True),
        lambda: fastattn.scaled_dot_product_attention(*parts, is_causal=True),
        lambda: fastattn.attention_weights(*parts[:2]),
    ]
    with context_parallel(mesh_of(group), buffers=parts, buffer_seq_dims=[2] * 3):
        for call in calls:
            with pytest.raises(
                RuntimeError, match=r"fastattn\.distributed\.attention\(q, k, v, gro"
            ):
                call()
        out = distributed.attention(*parts, causal=True, layout="zigzag", group=group)
    assert torch.equal(fastattn.attention(*parts, causal=True), right)
    return distributed.unshard(out, layout="zigzag", group=group) - right


def test_inside_torchs_context_parallel_a_call_raises_or_runs_over_ranks(four):
    """context_parallel shards the sequence, and only torch's own function accounts for that."""
    assert results_of(four, 2, inside).abs().max() < 1e-14


def patched(group, order):
    """The placements of q in torch's function, with context_parallel and `fastattn.sdpa`."""
    parts = [torch.randn(1, HEADS, 256, 32) for _ in range(3)]  # large enough for our kernels
    cut = context_parallel(mesh_of(group), buffers=parts, buffer_seq_dims=[2] * 3)
    got = []

    def scaled_dot_product_attention(query, *rest, **named):
        """A stub: on CPUs, torch's function takes minutes to choose its sharding."""
        got.append(getattr(query, "placements", None))
        return query

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
        for each in (fastattn.sdpa(), cut)[::order]:
            stack.enter_context(each)
        F.scaled_dot_product_attention(*parts)
    return got


@pytest.mark.parametrize("order", [1, -1], ids=["patched outside", "patched inside"])
def test_inside_context_parallel_a_patched_function_is_torchs(four, order):
    """Our function in its place would see only part of the keys."""
    for found in four.run(2, patched, order):
        assert found == [(tensor.Shard(2),)]


# -- around attention over ranks -------------------------------------------------------------------


class Model(nn.Module):
    """Sinks, a window and dropout. With `group`, each rank has part of the sequence."""

    def __init__(self, group=None, strategy="gather", wrap=None):
        super().__init__()
        self.group, self.strategy, self.wrap = group, strategy, wrap
        self.blocks = nn.ModuleList(
            nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * DIM) for _ in range(LAYERS)
        )
        self.sinks = nn.Parameter(torch.randn(LAYERS, HEADS))
        self.out = nn.Linear(WIDTH, 7)

    def block(self, x, layer, sinks):
        heads = self.blocks[layer](x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        qkv = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
        about = dict(causal=True, window=(9, 0), dropout_p=0.2, seed=layer)
        if self.group is None:
            out = fastattn.attention(*qkv, sinks=sinks, **about)
        else:
            about |= dict(group=self.group, strategy=self.strategy)
            out = distributed.attention(*qkv, sinks=sinks, **about)
        return x + out.transpose(1, 2).flatten(2)

    def forward(self, x):
        for layer in range(LAYERS):
            sinks = self.sinks[layer]
            if self.group is not None:  # the gradient is already summed over ranks
                sinks.register_hook(lambda grad: grad / dist.get_world_size(self.group))
            given = x, layer, sinks
            x = self.wrap(self.block, *given) if self.wrap else self.block(*given)
        return self.out(x)


def data():
    torch.manual_seed(1)
    return torch.randn(2, LENGTH, WIDTH), torch.randint(7, (2, LENGTH))


def model_of(*given, **more):
    torch.manual_seed(0)
    return Model(*given, **more)


def alone():
    model, (x, labels) = model_of(), data()
    return gradients_of(model, x, F.cross_entropy(model(x).flatten(0, 1), labels.flatten()))


def share_of_loss(model, group):
    """The contribution of this rank's tokens to the mean loss."""
    x, labels = (distributed.shard(x, dim=1, group=group) for x in data())
    return F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum") / (2 * LENGTH)


def found_by(model, group):
    """Loss and gradients with a wrapper that averages over ranks, so losses are scaled by P."""
    loss = share_of_loss(model, group)
    (loss * group.size()).backward()
    dist.all_reduce(total := loss.detach(), group=group)
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return wholes({"loss": total} | grads)


def by_ddp(group, strategy):
    return found_by(DistributedDataParallel(model_of(group, strategy), process_group=group), group)


def by_fsdp(group, strategy):
    from torch.distributed.fsdp import fully_shard

    model, mesh = model_of(group, strategy), mesh_of(group)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return found_by(fully_shard(model, mesh=mesh), group)


def by_hand(group, model):
    """Loss and gradients without a wrapper: they are summed over ranks."""
    loss = share_of_loss(model, group)
    loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    for x in found.values():
        dist.all_reduce(x, group=group)
    return found


def by_checkpoints(group, strategy, reentrant):
    def wrap(block, *given):
        return checkpoint(block, *given, use_reentrant=reentrant)

    return by_hand(group, model_of(group, strategy, wrap))


def by_compile(group, strategy):
    model = model_of(group, strategy)
    model.block = torch.compile(model.block, backend="aot_eager")
    return by_hand(group, model)


STRATEGIES = pytest.mark.parametrize("strategy", ["gather", "ring", "ulysses"])


@STRATEGIES
def test_ddp(four, strategy):
    close(results_of(four, 2, by_ddp, strategy), alone())


@STRATEGIES
def test_fsdp2(four, strategy):
    close(results_of(four, 2, by_fsdp, strategy), alone())


@pytest.mark.slow
@STRATEGIES
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpoints(four, strategy, reentrant):
    close(results_of(four, 2, by_checkpoints, strategy, reentrant), alone())


@pytest.mark.slow
@STRATEGIES
def test_compiled(four, strategy):
    close(results_of(four, 2, by_compile, strategy), alone())
