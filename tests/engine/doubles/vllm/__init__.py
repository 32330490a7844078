"""In the place of vLLM, whose kernels SGLang imports on a CPU and does not call."""
