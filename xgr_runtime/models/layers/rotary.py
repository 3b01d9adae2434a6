"""Frequencies of the rotary embedding; angles are their fp32 products with positions, as the checkpoints were trained.

D head dim.
"""

import torch


def rotary_frequency(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """fp32 [D], both halves alike: the angle of pair i at position t is t * theta^(-2 i / D), not scaled."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return (1.0 / theta**exponent).repeat(2).to(device)
