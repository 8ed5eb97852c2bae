"""Print the stub of flash-attn's functions, from which type checkers read what a call returns.

The functions of fastattn/flash_attn/flash_attn_interface.py return more than a tensor if a flag
says so. The stub has three overloads of each: for False, for True, and for any bool.
"""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "fastattn" / "flash_attn" / "flash_attn_interface.py"
FLAGS = ("return_attn_probs", "return_softmax_lse")
HEADER = """from typing import Literal, overload

from torch import Tensor

from .translation import Results
"""


def overloads(function):
    """The three overloads. The flag is the last argument with a name, or block_table follows it."""
    alone, more = function.returns.left, function.returns.right
    names = [x.arg for x in function.args.args]
    (at,) = (names.index(flag) for flag in FLAGS if flag in names)
    function.body = [ast.Expr(ast.Constant(...))]
    function.decorator_list = [ast.Name("overload")]
    written, arguments = ast.unparse(function), function.args
    flag = arguments.args[at]
    flag.annotation, function.returns = ast.parse("Literal[False]", mode="eval").body, alone
    false = ast.unparse(function)
    # For True the flag is given, so it has no default: it and what follows are given by name.
    flag.annotation, function.returns = ast.parse("Literal[True]", mode="eval").body, more
    later, missing = arguments.args[at:], len(arguments.args) - len(arguments.defaults)
    defaults = [None, *arguments.defaults[at + 1 - missing :]]
    arguments.kwonlyargs = [*later, *arguments.kwonlyargs]
    arguments.kw_defaults = [*defaults, *arguments.kw_defaults]
    del arguments.args[at:], arguments.defaults[at - missing :]
    true = ast.unparse(function)
    return "\n".join((false, true, written))


if __name__ == "__main__":
    body = ast.parse(SOURCE.read_text("utf-8")).body
    (public,) = (x for x in body if isinstance(x, ast.Assign) and x.targets[0].id == "__all__")
    names = ast.literal_eval(public.value)
    functions = [overloads(x) for x in body if getattr(x, "name", "") in names]
    print(HEADER, ast.unparse(public), *functions, sep="\n")
