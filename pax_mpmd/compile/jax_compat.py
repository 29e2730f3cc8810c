"""The only file of the compiler that touches JAX internals.

What differs between JAX 0.4.26 and newer versions is settled here; the passes see one set of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any

import jax
from jax import core as _jax_core
from jax._src import ad_checkpoint
from jax._src import config
from jax._src import core as _src_core
from jax._src import debugging
from jax._src import source_info_util
from jax.extend import core as _core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe

try:
  from jax._src.random import prng
except ImportError:  # 0.4.26: jax._src.random is a module
  from jax._src import prng
if not hasattr(_core, 'Primitive'):  # 0.4.26: these names are still in jax.core
  _core = _jax_core

Primitive = _core.Primitive
Jaxpr = _core.Jaxpr
ClosedJaxpr = _core.ClosedJaxpr
Var = _core.Var
Literal = _core.Literal
JaxprEqn = _core.JaxprEqn
DropVar = _core.DropVar
jaxpr_as_fun = _core.jaxpr_as_fun
ShapedArray = _jax_core.ShapedArray
_typeof = jax.typeof if hasattr(jax, 'typeof') else _jax_core.get_aval

__all__ = [
    'ClosedJaxpr',
    'DropVar',
    'Jaxpr',
    'JaxprEqn',
    'Literal',
    'Primitive',
    'ShapedArray',
    'Var',
    'aval_of_value',
    'checkpoint_params',
    'dce',
    'eval_jaxpr',
    'hide_in_sources',
    'inner_jaxprs',
    'is_drop',
    'is_key',
    'jaxpr_as_fun',
    'new_eqn',
    'new_jaxpr',
    'new_var',
    'physical_aval',
    'register',
    'scan_params',
    'scan_sizes',
    'source_of',
    'source_or',
    'trace',
    'unwrap_key',
    'without_debug_effects',
    'wrap_key',
]

Zero = ad.Zero

_DEBUG_EFFECTS = (debugging.DebugEffect, debugging.OrderedDebugEffect)


def without_debug_effects(effects: Any) -> frozenset:
  """Effects of an equation, those of `jax.debug` left out."""
  return frozenset(e for e in effects if not isinstance(e, _DEBUG_EFFECTS))


def is_drop(v: Any) -> bool:
  """Whether `v` is the placeholder of an equation's unused result."""
  return isinstance(v, DropVar)


# 0.4.26: Var(suffix, aval); newer: Var(aval).
_VAR_ARGS = ('',) if 'suffix' in inspect.signature(Var.__init__).parameters else ()


def new_var(aval: Any) -> Any:
  """A fresh variable."""
  return Var(*_VAR_ARGS, strip_weak_type(aval))


def strip_weak_type(aval: Any) -> Any:
  """`aval` without weak typing, which has no meaning between programs."""
  return aval.update(weak_type=False) if getattr(aval, 'weak_type', False) else aval


_FRAMES_OF_TRACEBACK = 'traceback' in inspect.signature(source_info_util.user_frame).parameters
# Newer versions warn where a jaxpr doesn't say which function it is of.
_HAS_DEBUG_INFO = hasattr(_core, 'DebugInfo')


class _Absent:
  """Stands for a constant's value in a jaxpr that is open, where JAX has closed ones only.

  From 0.12 on `Jaxpr` and `ClosedJaxpr` are one class, in which constants are those with a value.
  """

  def __repr__(self) -> str:
    return 'absent'


_ABSENT = _Absent()


def new_jaxpr(
    constvars: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]
) -> Any:
  """A jaxpr of the given parts; effects are the union of the equations'.

  It is open: it says which variables are constants, their values go beside it.
  """
  effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
  parts = list(constvars), list(invars), list(outvars), list(eqns), effects
  if not _HAS_DEBUG_INFO:
    return Jaxpr(*parts)
  info = _core.DebugInfo('step', 'pax_mpmd', ('',) * len(invars), ('',) * len(outvars))
  if Jaxpr is not ClosedJaxpr:
    return Jaxpr(*parts, info)
  return Jaxpr(*parts, info, consts=[_ABSENT] * len(constvars))


def new_eqn(
    invars: Sequence[Any],
    outvars: Sequence[Any],
    primitive: Any,
    params: dict[str, Any],
    like: Any | None = None,
) -> Any:
  """An equation; `like` lends its source information."""
  info = like.source_info if like is not None else source_info_util.new_source_info()
  return _src_core.new_jaxpr_eqn(
      list(invars), list(outvars), primitive, params, frozenset(), info
  )


def trace(fn: Callable[..., Any], avals: Sequence[Any]) -> Any:
  """Traces `fn` of flat arguments to a ClosedJaxpr."""
  return jax.make_jaxpr(fn)(*avals)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
  """Evaluates a jaxpr, or stages it out where `args` are tracers. Results are arrays."""
  outs = _jax_core.eval_jaxpr(jaxpr, consts, *args)
  return [
      jax.numpy.asarray(x, v.aval.dtype) if isinstance(v, Literal) else x  # a bare Python number
      for v, x in zip(jaxpr.outvars, outs)
  ]


def dce(jaxpr: Any, used_outputs: Sequence[bool], instantiate: bool = True) -> tuple[Any, list]:
  """Removes equations that no used output needs; returns the jaxpr and which invars are used."""
  return pe.dce_jaxpr(jaxpr, list(used_outputs), instantiate=instantiate)


def _user_frame(eqn: Any) -> Any | None:
  info = eqn.source_info
  # 0.4.26 takes the whole, newer versions the traceback in it.
  return source_info_util.user_frame(info.traceback if _FRAMES_OF_TRACEBACK else info)


def source_of(eqn: Any) -> str:
  """The user's source line of an equation, as 'file.py:12 (function)'."""
  frame = _user_frame(eqn)
  if frame is None:
    return 'unknown'
  # Newer versions give qualified names: outer.<locals>.inner.
  return f'{frame.file_name}:{frame.start_line} ({frame.function_name.rsplit(".", 1)[-1]})'


def source_or(eqn: Any, call: Any | None) -> Any:
  """`eqn`; where it has no user's source line of its own, with that of `call` it was made in.

  In newer versions JAX's own jitted functions, `jnp.sort` say, hold lines of JAX only.
  """
  if call is None or _user_frame(eqn) is not None:
    return eqn
  return eqn.replace(source_info=call.source_info)


def inner_jaxprs(eqn: Any) -> list[Any]:
  """The jaxprs among an equation's parameters."""
  return list(_src_core.jaxprs_in_params(eqn.params))


def scan_sizes(eqn: Any) -> tuple[int, int]:
  """The numbers of constants and of carries of a `scan` equation."""
  params = eqn.params
  if 'ft_in' not in params:
    return params['num_consts'], params['num_carry']
  consts, carries, _ = params['ft_in'].unpack()
  return len(consts), len(carries)


def scan_params(
    params: dict[str, Any], closed: Any, num_consts: int, num_carry: int
) -> dict[str, Any]:
  """The parameters of a scan like that of `params`, of another body."""
  params = dict(params, jaxpr=closed)
  num_in, num_out = len(closed.in_avals), len(closed.out_avals)
  if 'ft_in' not in params:
    params.update(num_consts=num_consts, num_carry=num_carry)
    if 'linear' in params:
      params['linear'] = (False,) * num_in
    return params
  from jax._src import flattree as ft

  carries, xs = ft.nones(num_carry), ft.nones(num_in - num_consts - num_carry)
  params['ft_in'] = ft.pack((ft.nones(num_consts), carries, xs))
  params['ft_out'] = ft.pack((carries, ft.nones(num_out - num_carry)))
  return params


def checkpoint_params(params: dict[str, Any], jaxpr: Any) -> dict[str, Any]:
  """The parameters of a checkpoint like that of `params`, of another body."""
  cse = params['prevent_cse']
  # Newer versions take a flag for each operand, too.
  return dict(params, jaxpr=jaxpr, prevent_cse=any(cse) if isinstance(cse, tuple) else cse)


def hide_in_sources(path: str) -> None:
  """Makes `source_of` pass over the lines of the file `path`, as it does over JAX's own."""
  source_info_util.register_exclusion(path)


def register(
    primitive: Any,
    *,
    impl: Callable[..., Any],
    abstract_eval: Callable[..., Any],
    lowering: Callable[..., Any],
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
    transpose: Callable[..., Any] | None = None,
    dce: Callable[..., Any] | None = None,
) -> None:
  """Registers all the rules of a primitive with several results."""
  primitive.multiple_results = True
  primitive.def_impl(impl)
  primitive.def_abstract_eval(abstract_eval)
  mlir.register_lowering(primitive, lowering)
  ad.primitive_jvps[primitive] = jvp
  batching.primitive_batchers[primitive] = batch
  if transpose is not None:
    ad.primitive_transposes[primitive] = transpose
  if dce is not None:
    # Newer versions also tell which inputs are still read afterwards, a matter of mutable ones.
    pe.dce_rules[primitive] = lambda used_outputs, *rest: dce(used_outputs, rest[-1])


def lower_fun(fn: Callable[..., Any]) -> Callable[..., Any]:
  """A lowering rule that traces `fn`."""
  return mlir.lower_fun(fn, multiple_results=True)


def instantiate_zeros(tangent: Any) -> Any:
  """A tangent as an array, also where it is known to be zero."""
  return ad.instantiate_zeros(tangent)


def aval_of_value(x: Any) -> Any:
  """The aval of an array or tracer."""
  return _typeof(x)


def is_float0(aval: Any) -> bool:
  """Whether `aval` is of the dtype of tangents of integers."""
  return aval.dtype == jax.dtypes.float0


def zero_like_tangent(primal: Any) -> Any:
  """The symbolic zero tangent of a primal value."""
  aval = aval_of_value(primal)
  if hasattr(aval, 'to_tangent_aval'):
    return Zero(aval.to_tangent_aval())
  return Zero(aval.at_least_vspace())  # 0.4.26


broadcast_in_dim_p = jax.lax.broadcast_in_dim_p
copy_p = jax.make_jaxpr(jax.numpy.copy)(0.0).jaxpr.eqns[-1].primitive
optimization_barrier_p = (
    jax.lax.optimization_barrier_p
    if hasattr(jax.lax, 'optimization_barrier_p')
    else ad_checkpoint.optimization_barrier_p  # 0.4.26
)


@functools.cache
def _scalar_broadcast_params() -> dict[str, Any]:
  closed = jax.make_jaxpr(lambda x: jax.lax.broadcast_in_dim(x, (2,), ()))(0.0)
  return closed.jaxpr.eqns[0].params


def broadcast_params(shape: tuple[int, ...]) -> dict[str, Any]:
  """Parameters of `broadcast_in_dim` from a scalar; they differ between JAX versions."""
  return dict(_scalar_broadcast_params(), shape=tuple(shape))


def primitive_named(name: str) -> Any:
  """The two-operand primitive of that name, among those that combine partial reductions."""
  by_name = {
      'add': jax.lax.add_p,
      'max': jax.lax.max_p,
      'min': jax.lax.min_p,
      'mul': jax.lax.mul_p,
      'and': jax.lax.and_p,
      'or': jax.lax.or_p,
  }
  return by_name[name]


def is_key(x: Any) -> bool:
  """Whether an aval or array is of typed random keys (`jax.random.key`)."""
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def physical_aval(aval: Any) -> Any:
  """The aval of what is stored: for typed random keys their uint32 data, else `aval` itself."""
  return _src_core.physical_aval(aval)


def unwrap_key(x: Any) -> Any:
  """An array as it is stored; see `physical_aval`."""
  return jax.random.key_data(x) if is_key(x) else x


def wrap_key(x: Any, aval: Any) -> Any:
  """The inverse of `unwrap_key` for an array of `aval`."""
  if not is_key(aval):
    return x
  return prng.random_wrap(x, impl=aval.dtype._impl)


def lower_to_stablehlo(
    fn: Callable[..., Any],
    args: Sequence[Any],
    donated: Sequence[int],
    in_shardings: Sequence[Any] | None = None,
    out_shardings: Sequence[Any] | None = None,
) -> bytes:
  """Lowers `fn` for the default backend to serialized StableHLO, all args kept.

  For one device, or for those of the shardings.
  """
  options = {}
  if in_shardings is not None:
    options = {'in_shardings': tuple(in_shardings), 'out_shardings': list(out_shardings)}
  # Without source lines: equal programs that were written in different places stay equal.
  with config.traceback_in_locations_limit(0):
    jitted = jax.jit(fn, keep_unused=True, donate_argnums=tuple(donated), **options)
    lowered = jitted.lower(*args)
    return mlir.module_to_bytecode(lowered.compiler_ir('stablehlo'))
