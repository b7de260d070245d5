"""`SealedGrad` and `AbsentWeight`: tensors whose values are not to be used now, and that say so where they are used.

Chapter: book/dp/zero-3.  In: any call of torch with such a tensor.  Out: its shape and the like, or a ValueError.
Between a backward and the end of its sums, `.grad` holds neither this rank's gradient nor the sum; between two runs of
a unit, a weight of ZeRO-3 has no values.  Torch would compute with either, and the result would be wrong.
Autograd's engine does not pass here: it adds to a sealed gradient as to the buffer behind it.
Source: torch, "Extending torch Python API" (`__torch_function__`).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn

from dualpipe_lab._private import is_kernel, run_kernel, tree_leaves
from dualpipe_lab.grad_ready import Absent

# Properties and methods; "grad" is also torch.autograd.grad, which asks for a weight's gradient.
_NOT_VALUES = frozenset(
    """
    __len__ data_ptr device dim dtype element_size get_device grad grad_dtype grad_fn is_complex is_contiguous is_cpu
    is_cuda is_floating_point is_leaf is_meta is_mps is_nested is_quantized is_signed is_sparse is_xpu itemsize layout
    names nbytes ndim ndimension nelement numel output_nr register_hook register_post_accumulate_grad_hook requires_grad
    requires_grad_ retains_grad shape size storage_offset stride untyped_storage
    """.split()  # noqa: SIM905 (a list would take a screen)
)


class _Guarded:
    """Base of tensors that refuse every call which reads or changes their values."""

    __slots__ = ()
    sentence = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run calls that do not concern values, and refuse all others."""
        if is_kernel(func):  # the engine's own work, seen by a mode such as FlopCounterMode
            return run_kernel(func, args, kwargs or {})
        is_property = func.__name__ in ("__get__", "__set__", "__delete__")
        name = getattr(func, "__self__", func).__name__ if is_property else func.__name__
        is_torchs_own = is_property and name.startswith("_")  # such as the dictionaries of hooks
        if name in _NOT_VALUES or is_torchs_own:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
        used = next((leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, cls)), None)
        raise ValueError(f"{cls.sentence.format(getattr(used, 'label', repr(used)))}; this was {name}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}{tuple(self.shape)}"  # type: ignore[attr-defined]


class SealedGrad(_Guarded, Tensor):  # type: ignore[misc]
    """A gradient whose sum over the data ranks is not finished, or of which this rank keeps a shard alone."""

    sentence = (
        "the gradient {} is used between backward and step, while its sum over the data ranks is under way or sharded; "
        "clip with step(max_norm=), scale the loss or pass step(scaler=LossScaler()) in place of changing .grad, and "
        "read sums with dp.full_gradients(optimizer); under DDP, .grad is yours after finished_gradients()"
    )


class AbsentWeight(_Guarded, Absent, nn.Parameter):  # type: ignore[misc]
    """A weight of ZeRO-3 whose unit does not run; `label` is its name."""

    label: str
    sentence = (
        "the weight {} has no values here: ZeRO-3 keeps shards, and gathers a unit while its forward or backward runs; "
        "read, save, load or change weights inside of `with optimizer.gathered():`, or with dp.full_weights(optimizer) "
        "or dp.checkpoint; leave a weight that the loss or another module uses out of the units, so that the root has "
        "it for the full step, and call the module itself, not a method of it"
    )


class SealedGrads:
    """Sealed gradients of parameters whose `.grad` is None, since their sums are kept as shards elsewhere.

    A backward finds None again: a hook of the parameter opens its gradient before the engine adds to it.

    Args:
        shards: by parameter, a tensor of its gradients' type, whose first element the sealed gradient has as memory.
    """

    def __init__(self, shards: Mapping[nn.Parameter, Tensor]) -> None:
        self._sealed: dict[nn.Parameter, SealedGrad] = {}
        self._closed: set[nn.Parameter] = set()
        for parameter, shard in shards.items():
            alias = shard.as_strided(parameter.shape, (0,) * parameter.dim())
            self._sealed[parameter] = alias.as_subclass(SealedGrad)
            parameter.register_hook(partial(_before_accumulation, ref(self), ref(parameter)))

    def close(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Seal the gradients of some parameters (default: all), which a backward has summed."""
        for parameter in {*(self._sealed if parameters is None else parameters)} - self._closed:
            parameter.grad = self._sealed[parameter]
            self._closed.add(parameter)

    def open(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Set the sealed gradients of some parameters (default: all) to None, for a backward.

        Raises:
            ValueError: one was dropped or replaced.
        """
        for parameter in self._closed.intersection(self._sealed if parameters is None else parameters):
            check_sealed(parameter, self._sealed[parameter])
            parameter.grad = None
            self._closed.discard(parameter)

    def clear(self) -> None:
        """Set all gradients to None, for a new step."""
        for parameter in self._sealed:
            parameter.grad = None
        self._closed.clear()

    def check(self) -> None:
        """Raise ValueError if a sealed gradient was dropped or replaced."""
        for parameter in self._closed:
            check_sealed(parameter, self._sealed[parameter])


def _before_accumulation(grads: ReferenceType[SealedGrads], parameter: ReferenceType[nn.Parameter], _: Tensor) -> None:
    owner, found = grads(), parameter()
    if owner is not None and found is not None:
        owner.open([found])


def new_grad(parameter: nn.Parameter) -> Tensor:
    """Return the gradient that a backward has left.

    Raises:
        ValueError: another hook has taken it.
    """
    grad = parameter.grad
    if grad is None or isinstance(grad, SealedGrad):
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} was taken by another optimizer or hook; "
            "train a module with one optimizer, whose params= has a group for each learning rate, and delete one "
            "before making it anew"
        )
    return grad.detach()


def check_sealed(parameter: nn.Parameter, sealed: SealedGrad) -> None:
    """Raise ValueError unless a parameter has its sealed gradient."""
    if parameter.grad is not sealed:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} was dropped or replaced after its backward "
            "(parameter.grad = ..., or zero_grad() of the module), and its sum over the data ranks is kept elsewhere; "
            "clip with step(max_norm=), scale the loss in place of .grad, and begin every step with zero_grad() of the "
            "optimizer"
        )
