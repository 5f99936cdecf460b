"""The gradient proof: a comparison of the gradients of a trial and the baseline."""
