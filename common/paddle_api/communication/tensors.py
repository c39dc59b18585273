"""Paddle's tensors as NumPy's arrays, and back, in place; bfloat16 as the bits that NumPy has no type for."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from common.paddle_api.refusals import refuse_static
from common.tensors.reduction_of_any import BFLOAT16

__all__ = ["Array", "array_dtype", "array_of", "check_tensor", "check_tensors", "put_into"]

Array = npt.NDArray[Any]

NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
DTYPES = {getattr(paddle, name): np.dtype(name) for name in NAMES} | {paddle.bfloat16: BFLOAT16}


def check_tensor(call: str, what: str, tensor: Any) -> None:
    """
    Raises:
        ValueError: it is no tensor of a type that can be sent.
        UsageError: it is one of a static graph.
    """
    refuse_static(call)
    if not isinstance(tensor, paddle.Tensor):
        raise ValueError(f"{call}: {what} must be a Tensor (got {type(tensor).__name__}, expected paddle.Tensor)")
    if tensor.dtype not in DTYPES:
        known = ", ".join([*NAMES, "bfloat16"])
        raise ValueError(f"{call}: {what} cannot be of this dtype (got {tensor.dtype}, expected one of {known})")


def check_tensors(call: str, what: str, tensors: Any, count: int) -> list[Any]:
    """The tensors of a list or tuple.

    Raises:
        ValueError: it is none, or not of one for each of so many ranks.
    """
    if not isinstance(tensors, Sequence):
        raise ValueError(f"{call}: {what} must be a list (got {type(tensors).__name__}, expected a list of Tensors)")
    if len(tensors) != count:
        raise ValueError(f"{call}: {what} must hold a tensor for each rank (got {len(tensors)}, expected {count})")
    for tensor in tensors:
        check_tensor(call, f"each of {what}", tensor)
    return list(tensors)


def array_dtype(tensor: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = DTYPES[tensor.dtype]
    return found


def array_of(tensor: Any) -> Array:
    """A copy of its elements, contiguous."""
    array: Array = np.require(tensor.numpy(), requirements=["C", "W"])
    return array


def put_into(call: str, tensor: Any, array: Array) -> None:
    """Give a tensor these elements, in place.

    Raises:
        ValueError: it is of another dtype, or has another number of elements.
    """
    shape = list(tensor.shape)
    if array_dtype(tensor) != array.dtype:
        raise ValueError(
            f"{call}: a tensor for the result is of another dtype (got {tensor.dtype}, expected {array.dtype})"
        )
    if math.prod(shape) != array.size:
        raise ValueError(
            f"{call}: a tensor for the result has another size (got {shape}, expected {list(array.shape)})"
        )
    if tensor.is_contiguous() or not array.size:
        tensor.set_value(array.reshape(shape))
    else:
        memory_of(tensor, array.dtype)[...] = array.reshape(shape)


def memory_of(tensor: Any, dtype: np.dtype[Any]) -> Array:
    """The elements of a view, where they are: `set_value` would put them there side by side. Not empty."""
    strides = [step * dtype.itemsize for step in tensor.strides]
    span = dtype.itemsize + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
    memory = np.frombuffer((ctypes.c_char * span).from_address(tensor.data_ptr()), np.uint8)
    return np.lib.stride_tricks.as_strided(memory[: dtype.itemsize].view(dtype), tensor.shape, strides)
