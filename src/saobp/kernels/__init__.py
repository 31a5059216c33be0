"""The fused operation: Triton kernels, their launches, and the operators that PyTorch sees."""
