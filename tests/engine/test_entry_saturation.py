"""The E4M3 scale of a cached latent saturates like every other E4M3 value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.formats import quantise_fp4_e4m3
from engine.ops.attention import pack_entry_rows

WIDTH, KEY = 64, 32


@pytest.mark.parametrize("largest", [1.0, 2600.0, 2800.0, 3000.0, 60000.0])
def test_large_latents_saturate_the_scale(largest):
    latent = torch.linspace(-1, 1, WIDTH).mul(largest).to(torch.bfloat16)
    bits = latent.view(torch.int16).numpy().view(np.uint16)[None]
    out = np.zeros((1, WIDTH // 2 + WIDTH // 16 + KEY // 2 + KEY // 32), np.uint8)
    pack_entry_rows(0, 1, bits, np.zeros((1, KEY), np.uint16), out)
    codes, scales = quantise_fp4_e4m3(latent.float().numpy()[None])
    assert out[0, : WIDTH // 2].tobytes() == codes.tobytes()
    assert out[0, WIDTH // 2 : WIDTH // 2 + WIDTH // 16].tobytes() == scales.tobytes()
