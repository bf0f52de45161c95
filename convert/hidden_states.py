"""Hidden states of many sequences, of which memory holds no more than a limit.

Calibration and evaluation go through a layer sequence by sequence, so only one sequence's states
need to be in memory. Up to the limit all stay where they are computed, which is fastest; beyond it
they go to a file without a name in the temporary folder (``TMPDIR``, which should lie on a disk);
the system removes it with the last reference.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import overload

import torch

from tpla.core.errors import CheckpointError

MEMORY_BYTES = 4 * 2**30
"""Hidden states that stay in memory, all texts of a command together."""


class _Sequences(Sequence[torch.Tensor]):
    """Sequences that are read when asked for; of a slice, each when it is asked for."""

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        chosen = range(len(self))[index]
        return Chosen(self, chosen) if isinstance(chosen, range) else self._read(chosen)

    def _read(self, index: int) -> torch.Tensor:
        raise NotImplementedError


class HiddenStates(_Sequences):
    """``[T, E]`` of each sequence; an item can be replaced, and is never written into.

    Args:
        states: the first states, one sequence at a time.
        lengths: T of each sequence.
        hidden_size: E.
        dtype: of the states.
        device: where they are given back.
        memory_bytes: most that stay in memory.

    Raises:
        CheckpointError: the temporary folder cannot take what does not stay in memory.
    """

    def __init__(
        self,
        states: Iterable[torch.Tensor],
        lengths: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._lengths, self._hidden_size = list(lengths), hidden_size
        self._dtype, self._device, self._memory_bytes = dtype, device, memory_bytes
        row_bytes = hidden_size * dtype.itemsize
        self._offsets = [0, *accumulate(length * row_bytes for length in lengths)]
        self._kept: list[torch.Tensor] = []
        self._file = None
        if self._offsets[-1] > memory_bytes:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its owner
        for index, state_TE in enumerate(states):
            if self._file is None:
                self._kept.append(state_TE)
            else:
                self[index] = state_TE

    @property
    def spilled(self) -> bool:
        """Whether they lie in a file."""
        return self._file is not None

    def copy(self) -> HiddenStates:
        """The same states, to be replaced independently."""
        return HiddenStates(
            self, self._lengths, self._hidden_size, self._dtype, self._device, self._memory_bytes
        )

    def __len__(self) -> int:
        return len(self._lengths)

    def _read(self, index: int) -> torch.Tensor:
        if self._file is None:
            return self._kept[index]
        length = self._lengths[index]
        raw = torch.empty(length * self._hidden_size * self._dtype.itemsize, dtype=torch.uint8)
        self._file.seek(self._offsets[index])
        self._file.readinto(raw.numpy().data)
        return raw.view(self._dtype).view(length, self._hidden_size).to(self._device)

    def __setitem__(self, index: int, state_TE: torch.Tensor) -> None:
        assert state_TE.shape == (self._lengths[index], self._hidden_size)
        if self._file is None:
            self._kept[index] = state_TE
            return
        raw = state_TE.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            self._file.seek(self._offsets[index])
            self._file.write(raw.data)
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._offsets[-1]} bytes of hidden states do not fit {tempfile.gettempdir()} "
                f"({error.strerror}); point TMPDIR at a larger disk, give less text, or raise "
                "--state-memory"
            ) from error


class Chosen(_Sequences):
    """Some of the sequences, read when asked for.

    Args:
        states: all of them.
        indices: which, in order.
    """

    def __init__(self, states: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        self._states, self._indices = states, indices

    def __len__(self) -> int:
        return len(self._indices)

    def _read(self, index: int) -> torch.Tensor:
        return self._states[self._indices[index]]
