"""One repair of Triton 3.6's interpreter, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def repair_interpreter() -> None:
    """Multiply bf16 operands as numbers; the interpreter multiplies their bit patterns."""
    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot
    if getattr(create_dot, "repaired", False):
        return

    def as_float32(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def repaired(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *rest)

    repaired.repaired = True  # type: ignore[attr-defined]
    builder.create_dot = repaired
