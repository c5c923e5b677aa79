"""Metrics that are no mean over tokens, from means over tokens.

A token loss gives metrics [N] that the trainer averages over the loss_mask tokens of a mini-batch; finished() makes

    val/ratio_var     the variance of the ratio w over those tokens, of val/ratio_spread and val/ratio:
                      mean (w - 1)^2 - (mean w - 1)^2
    <name>            of `pairs:<name>`, a sum over pairs: its mean over pairs. `pairs` is 1 on one token of each pair

Apply it last, to the means over all tokens that are to be told of together.
"""


def finished(means: dict[str, float]) -> dict[str, float]:
    """The metrics to log, from means over tokens by name. Others pass unchanged."""
    found = dict(means)
    if "val/ratio_spread" in found:
        found["val/ratio_var"] = found.pop("val/ratio_spread") - (found["val/ratio"] - 1.0) ** 2
    pairs = found.pop("pairs", None)
    for name in [name for name in found if name.startswith("pairs:")]:
        total = found.pop(name)
        found[name.removeprefix("pairs:")] = total / pairs if pairs else 0.0
    return found
