"""Step function -> one flat jaxpr with exactly one `accumulate_grads` equation.

In: the user's step and the avals of its flat arguments.
Out: a `TracedStep`.
Holds: nested calls are inlined (also in the loop's body), sharding constraints are left only where
an actor has a mesh of several devices, every variable is bound once, nothing dead is left, and
marks stand only where they can be cut: `accumulate_grads` in the step itself, `pipeline_yield` in
the loop's body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.marks import LOOP_SCOPE
from pax_mpmd.errors import PartitionError

# Calls whose body may stand in their place. After differentiation the custom rules have done
# their work, so what is left of them is a plain call.
_CALLS = {
    'pjit': 'jaxpr',
    'jit': 'jaxpr',
    'closed_call': 'call_jaxpr',
    'core_call': 'call_jaxpr',
    'core_closed_call': 'call_jaxpr',
    'eval_jaxpr': 'call_jaxpr',
    'custom_jvp_call': 'call_jaxpr',
    'custom_vjp_call': 'call_jaxpr',
    'custom_vjp_call_jaxpr': 'fun_jaxpr',
}
_IDENTITIES = frozenset({'name'})
_MARKS = frozenset({'pipeline_yield', 'accumulate_grads'})
_CALLBACKS = frozenset({'pure_callback', 'io_callback', 'outside_call', 'infeed', 'outfeed'})
_DEBUG = frozenset({'debug_callback', 'debug_print'})
_CHECKPOINTS = frozenset({'checkpoint', 'remat', 'remat2'})


def mesh_sizes(mesh: Any | None) -> dict[str, int]:
  """The axes of a mesh that have several devices, with their sizes; none of no mesh."""
  shape = {} if mesh is None else dict(mesh.shape)
  return {str(name): size for name, size in shape.items() if size > 1}


@dataclasses.dataclass(frozen=True)
class TracedStep:
  """A traced step: `jaxpr.constvars` go with `consts`, `jaxpr.invars` with the flat arguments.

  `notes` has a line for everything that was left out.
  """

  jaxpr: Any
  consts: tuple[Any, ...]
  out_tree: Any
  notes: tuple[str, ...] = ()


def loop_of(jaxpr: Any) -> Any:
  """The step's `accumulate_grads` equation."""
  (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == 'accumulate_grads']
  return eqn


def trace_step(
    step: Callable[..., Any],
    in_tree: Any,
    avals: Sequence[Any],
    donated: Sequence[bool],
    mesh: Any | None = None,
) -> TracedStep:
  """Traces `step`, called with the arguments that `in_tree` and the flat `avals` describe.

  `donated` says for each flat argument whether the caller gives it up; `mesh` is that of an actor,
  None if it has one device.

  Raises:
    PartitionError: the step has no `accumulate_grads`, several, or one inside a loop or branch;
      or a `pipeline_yield` stands where it can't be cut; or the step calls back into Python, or
      returns typed random keys; or it constrains a sharding on another mesh than the actor's.
  """
  out_tree: list[Any] = []

  def flat_step(*flat):
    args, kwargs = jax.tree_util.tree_unflatten(in_tree, flat)
    leaves, tree = jax.tree_util.tree_flatten(step(*args, **kwargs))
    out_tree.append(tree)
    return leaves

  closed = jc.trace(flat_step, avals)
  _check_results(closed, out_tree[-1])
  inliner = _Inliner(inside=None, notes=[], mesh=mesh)
  jaxpr = inliner.closed(closed)
  jaxpr, _ = jc.dce(jaxpr, [True] * len(jaxpr.outvars))
  _check_marks(jaxpr)
  kept = [v for v, given_up in zip(jaxpr.invars, donated) if not given_up]
  jaxpr = _own_results(jaxpr, [*inliner.constvars, *kept])
  consts = dict(zip(inliner.constvars, inliner.consts))
  jaxpr, consts = _drop_unused_consts(jaxpr, consts)
  return TracedStep(jaxpr, tuple(consts), out_tree[-1], tuple(dict.fromkeys(inliner.notes)))


def inlined(closed: Any) -> tuple[Any, list[Any]]:
  """A ClosedJaxpr's nested calls put in place: its jaxpr, and values of `jaxpr.constvars`.

  Sharding constraints are dropped.

  Raises:
    PartitionError: it calls back into Python, or has other side effects.
  """
  inliner = _Inliner(inside=None, notes=[], mesh=None)
  jaxpr = inliner.closed(closed)
  jaxpr, _ = jc.dce(jaxpr, [True] * len(jaxpr.outvars))
  consts = dict(zip(inliner.constvars, inliner.consts))
  return _drop_unused_consts(jaxpr, consts)


def _check_results(closed: Any, out_tree: Any) -> None:
  tree = jax.tree_util.tree_unflatten(out_tree, closed.jaxpr.outvars)
  for path, v in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if jc.is_key(v.aval):
      raise PartitionError(
          f'Result {jax.tree_util.keystr(path)} of the step is {v.aval.str_short()}, typed random'
          ' keys, which can be used within a step but not be passed in or out. Return'
          ' jax.random.key_data(key), and in the step use jax.random.wrap_key_data(data).'
      )


def _check_marks(jaxpr: Any) -> None:
  loops = [e for e in jaxpr.eqns if e.primitive.name == 'accumulate_grads']
  if len(loops) != 1:
    where = ''.join(f'\n  {jc.source_of(e)}' for e in loops)
    raise PartitionError(
        f'The step has {len(loops)} accumulate_grads loops that its results depend on; mpmd_jit'
        f' needs exactly one.{where or " Wrap the microbatch loop in accumulate_grads(fn, batch)."}'
    )
  stray = [e for e in jaxpr.eqns if e.primitive.name == 'pipeline_yield']
  if stray:
    raise PartitionError(
        'pipeline_yield is called outside the microbatch loop, at'
        f' {jc.source_of(stray[0])}. Call it in the function given to accumulate_grads.'
    )


def _own_results(jaxpr: Any, kept: Sequence[Any]) -> Any:
  """Gives each result a variable of its own, none of `kept`: a value that can be given away."""
  taken = set(kept)
  eqns, outvars = list(jaxpr.eqns), []
  for v in jaxpr.outvars:
    if isinstance(v, jc.Literal) or v in taken:
      out = jc.new_var(v.aval)
      eqns.append(jc.new_eqn([v], [out], jc.copy_p, {}))
      v = out
    taken.add(v)
    outvars.append(v)
  return jc.new_jaxpr(jaxpr.constvars, jaxpr.invars, outvars, eqns)


def _drop_unused_consts(jaxpr: Any, consts: dict[Any, Any]) -> tuple[Any, list[Any]]:
  used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, jc.Var)}
  used.update(v for v in jaxpr.outvars if isinstance(v, jc.Var))
  kept = [v for v in consts if v in used]
  new = jc.new_jaxpr(kept, jaxpr.invars, jaxpr.outvars, jaxpr.eqns)
  return new, [consts[v] for v in kept]


class _Inliner:
  """Copies jaxprs with fresh variables, nested calls put in place.

  `constvars` and `consts` collect the constants of all inlined jaxprs, which become the outermost
  jaxpr's. `inside` names the equation whose body this is, None for the step and the loop's body.
  `notes` gets a line for each equation left out. `mesh` as in `trace_step`.
  """

  def __init__(self, inside: Any | None, notes: list[str], mesh: Any | None):
    self.inside = inside
    self.notes = notes
    self._mesh = mesh
    self.constvars: list[Any] = []
    self.consts: list[Any] = []
    self._by_identity: dict[int, Any] = {}

  def closed(self, closed: Any) -> Any:
    """The inlined jaxpr of a ClosedJaxpr."""
    invars = [jc.new_var(v.aval) for v in closed.jaxpr.invars]
    eqns: list[Any] = []
    outs = self.into(eqns, closed.jaxpr, self._const_vars(closed), invars)
    return jc.new_jaxpr((), invars, outs, eqns)

  def _const_vars(self, closed: Any) -> list[Any]:
    return self._known_consts(closed.jaxpr.constvars, closed.consts)

  def _known_consts(self, constvars: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
    """This inliner's variables for `consts`; one for each array, however often it is met."""
    out = []
    for var, const in zip(constvars, consts):
      known = self._by_identity.get(id(const))
      if known is None:
        known = jc.new_var(var.aval)
        self._by_identity[id(const)] = known
        self.constvars.append(known)
        self.consts.append(const)
      out.append(known)
    return out

  def into(
      self,
      eqns: list[Any],
      jaxpr: Any,
      consts: Sequence[Any],
      args: Sequence[Any],
      call: Any | None = None,
  ) -> list[Any]:
    """Appends `jaxpr`'s equations, applied to `args`, to `eqns`; returns its results.

    `call` is the equation that stood in their place.
    """
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(atom):
      return atom if isinstance(atom, jc.Literal) else env[atom]

    for eqn in jaxpr.eqns:
      eqn = jc.source_or(eqn, call)
      name = eqn.primitive.name
      invars = [read(v) for v in eqn.invars]
      if name in _IDENTITIES or (
          name == 'sharding_constraint' and not self._constrains(eqn)
      ):
        env.update(zip(eqn.outvars, invars))
        continue
      closed = _called(eqn)
      if closed is not None:
        outs = self.into(eqns, closed.jaxpr, self._const_vars(closed), invars, eqn)
        env.update(zip(eqn.outvars, outs))
        continue
      if name in _DEBUG:
        self.notes.append(
            f'jax.debug.print or callback at {jc.source_of(eqn)} is left out: programs can\'t call'
            ' back from the actors. Return the value from the step, stacked, to see it'
        )
        continue
      if name in _CALLBACKS:
        raise PartitionError(
            f'The step calls {name}, at {jc.source_of(eqn)}. Programs run on actors, which can\'t'
            ' call back into this Python process. Compute the value with JAX, or before the step'
            ' and pass it in the batch.'
        )
      if self.inside is not None and name in _MARKS:
        if LOOP_SCOPE in str(self.inside.source_info.name_stack):
          raise PartitionError(
              f'accumulate_grads is differentiated or vmapped as a whole, at'
              f' {jc.source_of(self.inside)}, so that {name} at {jc.source_of(eqn)} can\'t be cut.'
              ' Take the gradient inside: accumulate_grads(lambda mb: (jax.grad(loss)(params, mb),'
              ' ()), batch) sums the gradients of the microbatches.'
          )
        around = self.inside.primitive.name
        around = 'checkpoint' if around in _CHECKPOINTS else around
        raise PartitionError(
            f'{name} is called inside {around}, at {jc.source_of(eqn)}'
            f' ({around} at {jc.source_of(self.inside)}). The step is cut at'
            ' its marks, so they must stand outside of loops, branches and checkpoints: apply'
            ' those to the single stages.'
        )
      if name == 'accumulate_grads':
        params, invars = self._loop(eqn, invars)
      else:
        params = {k: self._inlined(eqn, v) for k, v in eqn.params.items()}
      outvars = []
      for v in eqn.outvars:
        fresh = v if jc.is_drop(v) else jc.new_var(v.aval)
        outvars.append(fresh)
        env[v] = fresh
      effects = jc.without_debug_effects(eqn.effects)
      if effects and self.inside is None:
        raise PartitionError(
            f'{name} at {jc.source_of(eqn)} has the side effects {sorted(map(str, effects))}, whose'
            ' order can\'t be kept between actors. Take it out of the step.'
        )
      eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects))
    return [read(v) for v in jaxpr.outvars]

  def _constrains(self, eqn: Any) -> bool:
    """Whether a sharding constraint says something about the devices of an actor."""
    mesh = getattr(eqn.params['sharding'], 'mesh', None)
    found, ours = mesh_sizes(mesh), mesh_sizes(self._mesh)
    if ours and found and found != ours:
      raise PartitionError(
          f'The sharding constraint at {jc.source_of(eqn)} is on a mesh of {found}; an actor\'s'
          f' mesh is {ours} (the argument `mesh` of mpmd_jit). Constrain on that'
          ' mesh.'
      )
    return bool(ours and found)

  def _loop(self, eqn: Any, invars: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The loop's parameters, its body inlined, and its operands.

    Constants that the body held become operands, in front of the others.
    """
    inner = _Inliner(None, self.notes, self._mesh)
    body = inner.closed(eqn.params['jaxpr'])
    body = jc.new_jaxpr((), [*inner.constvars, *body.invars], body.outvars, body.eqns)
    consts = self._known_consts(inner.constvars, inner.consts)
    num_consts = eqn.params['num_consts'] + len(consts)
    params = dict(eqn.params, jaxpr=jc.ClosedJaxpr(body, ()), num_consts=num_consts)
    return params, [*consts, *invars]

  def _inlined(self, eqn: Any, value: Any) -> Any:
    """A parameter of `eqn`; where it is a jaxpr, or holds some, with the calls inside inlined."""
    if type(value) in (tuple, list):  # not a named tuple
      return type(value)(self._inlined(eqn, v) for v in value)
    # A checkpoint's body is open; from JAX 0.12 on the types don't tell.
    if isinstance(value, jc.ClosedJaxpr) and eqn.primitive.name not in _CHECKPOINTS:
      inner = _Inliner(eqn, self.notes, self._mesh)
      jaxpr = inner.closed(value)
      jaxpr = jc.new_jaxpr(inner.constvars, jaxpr.invars, jaxpr.outvars, jaxpr.eqns)
      return jc.ClosedJaxpr(jaxpr, inner.consts)
    if isinstance(value, jc.Jaxpr) and not value.constvars:
      inner = _Inliner(eqn, self.notes, self._mesh)
      jaxpr = inner.closed(jc.ClosedJaxpr(value, ()))
      # An open jaxpr can't hold constants; keep the original where inlining found some.
      return value if inner.consts else jaxpr
    return value


def _called(eqn: Any) -> Any | None:
  """The ClosedJaxpr that may stand in the equation's place, if there is one."""
  name = eqn.primitive.name
  if name in _CHECKPOINTS and not eqn.params['differentiated']:
    inner = eqn.params['jaxpr']  # nothing is recomputed: a plain call
  elif name in _CALLS:
    inner = eqn.params[_CALLS[name]]
  else:
    return None
  return inner if hasattr(inner, 'consts') else jc.ClosedJaxpr(inner, ())
