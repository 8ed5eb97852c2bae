"""Lay out build/hub/fastattn/, a kernel repository of Hugging Face's hub, and check it.

hub.py          print a line for each step, with its seconds; the status is 1 if one fails

The files are those of the wheel in dist/, which `make wheels` made: a library that is built for
this machine alone would not load on an older Linux. Nothing is uploaded.

build/<variant>/        what the package `kernels` loads: the CPU kernels, and those of Triton
torch-ext/, build.toml  what kernel-builder would make the variant of Triton's kernels from. The
                        CPU kernels are a library without torch, with code for each instruction
                        set: it has no form for that.
"""

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
import zipfile

from wheels import BUILD, ROOT, THIS, Failed, borrow_torch, make_environment, run, run_steps, wheel

NAME = "fastattn"
# The hub's number of the interface, which changes where a call that ran would no longer run.
# transformers loads version 1 of a kernel, unless the name that it gets has a revision.
VERSION = 1
LICENSE = "mit"
REPOSITORY = BUILD / "hub" / NAME
COPIED = (".py", ".pyi", ".json")  # measured choices are JSON
# Programs that import the package by the name under which pip installs it.
PROGRAMS = ("commands", "examples", "__main__.py")
NATIVE = ("libfastattn_cpu.so", "fastattn_marshalling.abi3.so", "build.json")
# The newest version of each set of symbols in manylinux_2_28, which the hub asks for.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# The hub allows these, and the standard library. torch itself needs typing_extensions.
ALLOWED = {"torch", "triton", "typing_extensions", *sys.stdlib_module_names}
TOOLS = ("kernels", "kernel-abi-check")
# The manual of kernel-builder writes cuda-capabilities, which its parser refuses.
BUILD_TOML = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "{LICENSE}"
backends = ["cuda"]

[torch-noarch]
cuda_capabilities = ["8.0+PTX"]
"""
# By the names of TOOLS: what they parse, and what they find in a library.
PARSE = """
import sys
from pathlib import Path
import kernels
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from kernels.variants import parse_variant
root = Path(sys.argv[1])
Build.open(root)
for folder in (root / "build").iterdir():
    parse_variant(folder.name)
    metadata = Metadata.read_from_file(folder / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
print(kernels.__version__)
"""
INSPECT = """
import sys
from kernel_abi_check import ObjectFile
for path in sys.argv[1:]:
    library = ObjectFile(path)
    found = library.check_manylinux("manylinux_2_28") + library.check_python_abi("3.9")
    assert not found, (path, found)
"""
LOAD = """
import sys
import torch
from pathlib import Path
from kernels import get_local_kernel, get_loaded_kernels
root = Path(sys.argv[1])
cpu = get_local_kernel(root, backend="cpu")
assert cpu.available_backends()["cpu"] is None, cpu.available_backends()
triton = get_local_kernel(root / "build" / "torch-cuda")
names = [x.metadata.id for x in get_loaded_kernels()]
assert "fastattn" not in sys.modules and len(set(names)) == 2, names
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3))
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
grads = torch.autograd.grad(expected.sum(), (q, k, v))
for found in (cpu, triton):
    backend = "cpu" if found is cpu else "triton"
    out = found.attention(q, k, v, causal=True, backend=backend)
    mine = torch.autograd.grad(out.sum(), (q, k, v))
    worst = [(x - y).abs().max().item() for x, y in zip((out, *mine), (expected, *grads))]
    assert max(worst) < 1e-5, (backend, worst)
    print(f"{backend}: {worst[0]:.1e} forward, {max(worst[1:]):.1e} backward")
"""
MODEL = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec("transformers") is None:
    sys.exit(print("not run: transformers is not installed"))
import kernels, torch, transformers
from transformers.utils import import_utils
note = f"transformers {transformers.__version__}, kernels {kernels.__version__}"
if not import_utils.is_kernels_available():  # it asks for another version, and calls only this
    installed, asked = importlib.metadata.version, import_utils.KERNELS_MIN_VERSION
    importlib.metadata.version = lambda x: asked if x == "kernels" else installed(x)
    getattr(import_utils.is_kernels_available, "cache_clear", lambda: None)()
    note += f" in place of {asked}"
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
config = transformers.LlamaConfig(num_key_value_heads=2, vocab_size=97, **sizes)
transformers.LlamaForCausalLM(config).save_pretrained("model")
load = transformers.AutoModelForCausalLM.from_pretrained
mine, eager = load("model", attn_implementation="owner/name"), load("model")
eager.set_attn_implementation("eager")
ids, mask = torch.randint(3, 97, (2, 12)), torch.ones(2, 12, dtype=torch.long)
mask[0, :5] = 0
options = dict(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
def results(model):
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    logits.square().mean().backward()
    return logits, [x.grad for x in model.parameters()]
torch.testing.assert_close(results(mine), results(eager), atol=1e-4, rtol=1e-4)
tokens = [x.generate(ids, attention_mask=mask, **options) for x in (mine, eager)]
assert torch.equal(*tokens)
prompts = [x[m.bool()].tolist() for x, m in zip(ids, mask)]
found = mine.generate_batch(
    prompts,
    generation_config=transformers.GenerationConfig(**options),
    continuous_batching_config=transformers.ContinuousBatchingConfig(
        num_blocks=32, page_size=8, max_batch_tokens=32, auto_switch_to_flash=False),
    progress_bar=False,
)
assert [x.generated_tokens for x in found.values()] == tokens[1][:, 12:].tolist()
assert mine.config._attn_implementation == "owner/name"
(loaded,) = kernels.get_loaded_kernels()
assert loaded.module.flash_attn_forward is transformers.AttentionInterface()["owner/name"]
print(note)
"""


def kept(folder):
    """The files of the package below a folder that a variant has, by their paths there."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")))
    return [x for x in paths if x.suffix in COPIED and x.parts[0] not in (*PROGRAMS, "lib")]


def copy_python(package, kernels, to):
    """Copy the Python of the package, and of the kernels, which are its subpackage."""
    for source, target in ((package, to), (kernels, to / "kernels")):
        for path in kept(source):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, target / path)


def write_metadata(folder, backend):
    """Write metadata.json. The identifier, under which `kernels` imports the package and the
    package registers its operators, is made of the contents: two versions never share it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {str(x.relative_to(folder)): hashlib.sha256(x.read_bytes()).digest() for x in paths}
    files = {name: base64.b64encode(x).decode() for name, x in hashes.items()}
    unique = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    found = {
        "name": NAME,
        "id": f"_{NAME}_{backend['type']}_{unique}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "kernel-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": files},
    }
    (folder / "metadata.json").write_text(json.dumps(found, indent=2) + "\n")


def cpu_variant():
    """The name of the folder of the CPU kernels. They use nothing of torch's C++, so they keep to
    its stable ABI, and one variant serves each torch from the oldest that the package takes."""
    (oldest,) = re.findall(r'"torch>=(\d+[.]\d+)"', (ROOT / "pyproject.toml").read_text())
    return f"torch-stable-abi{oldest.replace('.', '')}-cpu-{THIS}-linux"


def lay_out(package, kernels, libraries, to):
    """Write the repository. package, kernels, libraries: the folders of the Python of the package,
    of Triton's kernels, and of the compiled libraries."""
    shutil.rmtree(to, ignore_errors=True)
    cpu, triton = to / "build" / cpu_variant(), to / "build" / "torch-cuda"
    for folder in (cpu, triton, to / "torch-ext" / NAME):
        copy_python(package, kernels, folder)
    (cpu / "lib").mkdir()
    for name in NATIVE:
        if (libraries / name).exists():  # the extension is optional
            shutil.copyfile(libraries / name, cpu / "lib" / name)
    write_metadata(cpu, {"type": "cpu"})
    write_metadata(triton, {"type": "cuda", "archs": ["8.0+PTX"]})
    (to / "build.toml").write_text(BUILD_TOML)
    shutil.copyfile(ROOT / "LICENSE", to / "LICENSE")


def of_wheel():
    """Lay out the wheel's files."""
    found = wheel(THIS)
    folder = BUILD / "hub" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(found) as archive:
        archive.extractall(folder)
    package = folder / NAME
    lay_out(package, package / "kernels", package / "lib", REPOSITORY)
    variants = sorted(x.name for x in (REPOSITORY / "build").iterdir())
    return f"{found.name}: {', '.join(variants)}"


def modules(node):
    """The absolute names of modules that a node of a syntax tree imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []


def foreign_imports(path):
    """The lines of a file that import what the hub does not allow. An import in a function runs
    only where its caller has the module; one of the package by its own name is another copy."""
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    later = {x for f in ast.walk(tree) if isinstance(f, functions) for x in ast.walk(f)}
    for node in ast.walk(tree):
        for name in modules(node):
            top = name.partition(".")[0]
            if top == NAME or (node not in later and top not in ALLOWED):
                yield f"{path}:{node.lineno} {name}"


def check_imports():
    """The package imports itself by relative names, and of others only what the hub allows."""
    # Each of these is imported by its caller alone, where the library that it names is installed.
    paths = [x for x in (REPOSITORY / "torch-ext").rglob("*.py") if "integrations" not in x.parts]
    if found := [line for path in paths for line in foreign_imports(path)]:
        raise Failed(f"got imports that the hub does not allow:\n{chr(10).join(found)}")
    return f"{len(paths)} files"


def newest_symbols(path):
    """{set of symbols: its newest version that a library needs}, from the library's strings."""
    found = {}
    for name, text in re.findall(
        rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+|ABI_\w+)(?=\0)", path.read_bytes()
    ):
        # A mark of what a loader must know, such as ABI_DT_RELR, is newer than manylinux_2_28.
        numbered = not text.startswith(b"ABI")
        version = tuple(map(int, text.decode().split("."))) if numbered else (99,)
        found[name.decode()] = max(version, found.get(name.decode(), ()))
    return found


def check_libraries():
    """The libraries load on manylinux_2_28. kernel-abi-check reads the table of symbols that a
    stripped library does not have, so the versions that the loader asks for are read, too."""
    paths = sorted(REPOSITORY.glob("build/*/lib/*.so"))
    for path in paths:
        for name, version in newest_symbols(path).items():
            if version > NEWEST[name]:
                raise Failed(f"{path}: got {name} {version}, expected {NEWEST[name]} or older")
    run(tool_python(), "-c", INSPECT, *paths)
    return ", ".join(path.name for path in paths)


def tool_python():
    """The Python that has TOOLS."""
    return BUILD / "hub-tools" / "bin" / "python"


def make_tools():
    """Install `kernels` and its checks into a virtual environment of their own, with this torch."""
    made = make_environment("hub-tools", TOOLS)
    borrow_torch(BUILD / "hub-tools")
    return made


def parse():
    """`kernels` parses build.toml and each variant's name and metadata, and finds its hashes: also
    after it ran, for it refuses a variant to which a file was added."""
    return f"kernels {run(tool_python(), '-c', PARSE, REPOSITORY).strip()}"


def load():
    """`kernels` loads both variants into one process, and a call agrees with torch's; Triton's
    kernels run in its interpreter."""
    # The interpreter adds infinities that a mask hides.
    quiet = "-Wignore::RuntimeWarning:triton.runtime.interpreter"
    given = tool_python(), quiet, "-c", LOAD, REPOSITORY
    return "; ".join(run(*given, cwd=BUILD / "hub", TRITON_INTERPRET="1").splitlines())


def run_model():
    """transformers loads the repository as the hub's owner/name: logits, gradients and generated
    tokens, also of batches that change, are those of eager attention."""
    environment = dict(LOCAL_KERNELS=f"owner/name={REPOSITORY}", HF_HUB_OFFLINE="1")
    printed = run(tool_python(), "-Wignore", "-c", MODEL, cwd=BUILD / "hub", **environment)
    return next(x for x in printed.splitlines() if x.startswith(("transformers ", "not run")))


STEPS = (make_tools, of_wheel, check_imports, check_libraries, load, run_model, parse)

if __name__ == "__main__":
    sys.exit(run_steps(STEPS))
