"""The null GPU: the CUDA build of torch on a machine without a card.

`python tests/null_gpu --cards 2 COMMAND...` runs a command that sees two.

Libraries in place of CUDA's own, loaded before them (LD_PRELOAD): kernels do nothing, and memory of a card is counted
and mapped but never written. So torch's own dispatch, caching allocator and memory fraction, TRL and bitsandbytes'
CUDA library run at full model size, and allocate what they would on a card. Every tensor holds zeros; seconds mean
nothing; Triton compiles its kernels and starts none; cuDNN's attention does not run. Ranks wait for each other.

With `--values` (small models) the CPU computes what a card would, and ranks get each other's numbers: a training learns
what it learns on the CPU. The CPU's kernels may allocate besides, so bytes are compared without values.
"""
