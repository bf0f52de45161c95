"""Orthogonal bases of the latent: principal ones, randomised Hadamard, identity.

Principal of which second moment: :mod:`tpla.convert.second_moments`. A learned basis begins at
PCA's, see :mod:`tpla.convert.learned_rotation`.

RMSNorm without a weight commutes with an orthogonal U (TPLA, Proposition 1), so any of these gives
the same MLA model; they differ in how much a decode rank loses that sees one slice of the latent.

Shape suffixes: R latent dims.
"""

from __future__ import annotations

from enum import Enum

import torch


class Method(str, Enum):
    """How the basis is chosen."""

    PCA = "pca"
    CENTERED = "centered"
    ATTENDED = "attended"
    QUERIES = "queries"
    HADAMARD = "hadamard"
    IDENTITY = "identity"
    LEARNED = "learned"

    @property
    def is_measured(self) -> bool:
        """Whether the basis depends on calibration text."""
        return self not in (Method.HADAMARD, Method.IDENTITY)


def make_rotation(
    method: Method, rank: int, moment_RR: torch.Tensor | None, seed: int
) -> torch.Tensor:
    """Basis of one layer, for LEARNED where it begins; column i is the direction of dim i.

    Args:
        method: which basis.
        rank: R.
        moment_RR: second moment of the normalised latent that a measured basis is chosen by.
        seed: of the random signs of Hadamard.

    Returns:
        ``[R, R]`` float64, orthogonal.
    """
    if method is Method.IDENTITY:
        return torch.eye(rank, dtype=torch.float64)
    if method is Method.HADAMARD:
        return hadamard_rotation(rank, seed)
    assert moment_RR is not None, f"{method.value} is measured"
    return pca_rotation(moment_RR)


def pca_rotation(moment_RR: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of a second moment, largest eigenvalue first.

    The sign of each is fixed by its largest element, so that the same text gives the same files.

    Returns:
        ``[R, R]`` float64.
    """
    _, vectors_RR = torch.linalg.eigh(moment_RR.double())
    vectors_RR = vectors_RR.flip(1)
    largest = vectors_RR.abs().argmax(0, keepdim=True)
    signed_RR: torch.Tensor = vectors_RR * vectors_RR.gather(0, largest).sign()
    return signed_RR


def hadamard_rotation(rank: int, seed: int) -> torch.Tensor:
    """Hadamard matrix behind random signs (TPLA, section on Hadamard reparameterisation).

    Sizes that are no power of two, ``2^a * m`` with m odd, take the Kronecker product of the
    Hadamard matrix of size ``2^a`` and a random orthogonal ``m x m`` factor (QR of a Gaussian).

    Returns:
        ``[R, R]`` float64.
    """
    generator = torch.Generator().manual_seed(seed)
    power = rank & -rank
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    if rank > power:
        gaussian = torch.randn(
            rank // power, rank // power, dtype=torch.float64, generator=generator
        )
        matrix = torch.kron(matrix, torch.linalg.qr(gaussian).Q.contiguous())
    signs = torch.randint(0, 2, (rank, 1), generator=generator).double() * 2 - 1
    return signs.mul(matrix / power**0.5)


def spectrum(covariance_RR: torch.Tensor, rotation_RR: torch.Tensor) -> list[float]:
    """Share of the latent's energy along each rotated dim; for PCA, eigenvalue fractions."""
    energy = ((covariance_RR.double() @ rotation_RR) * rotation_RR).sum(0).clamp_min(0)
    return (energy / energy.sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist()
