"""The critic's loss, clipped around the values before the update as the policy's ratio is (PPO's reference code).

    L = 1/2 max((v - R)^2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)^2)

R is Batch.returns, v_old Batch.values. Every system includes the 1/2.
"""

import torch

from megarl.algorithms.sequences import written
from megarl.types import Batch


def token_loss(
    values: torch.Tensor, batch: Batch, cliprange_value: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss [N], metrics {name: [N]}) of the critic's present values [N]; 0 on tokens that were not written.

    Weigh it with aggregation.token_weights, as a policy's loss. val/clipfrac_avg: where the clipped is larger.
    """
    values, old, returns = (written(x, batch) for x in (values, batch.values, batch.returns))
    clipped = torch.clamp(values, old - cliprange_value, old + cliprange_value)
    unclipped_loss, clipped_loss = (values - returns).square(), (clipped - returns).square()
    metrics = {
        "val/clipfrac_avg": written((clipped_loss > unclipped_loss).to(values.dtype), batch),
        "val/value_avg": values.detach(),
        "val/error_avg": unclipped_loss.detach(),
    }
    return 0.5 * torch.maximum(unclipped_loss, clipped_loss), metrics
