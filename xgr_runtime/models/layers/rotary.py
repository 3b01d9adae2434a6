"""Angles of the rotary embedding, computed in fp32 from integer positions as the checkpoints were trained.

T packed tokens, D head dim.
"""

import torch


class Rotary:
    """Unscaled rotary embedding: the angle of pair i at position t is t * theta^(-2 i / D)."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self._frequency_D = (1.0 / theta**exponent).repeat(2).to(device)

    def cos_sin(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each fp32 [T, D] with equal halves, for int64 positions [T].

        One product takes whole numbers to fp32 and fills both halves: each step of a search pays for every kernel.
        """
        angle_TD = positions_T.unsqueeze(-1) * self._frequency_D
        return angle_TD.cos(), angle_TD.sin()
