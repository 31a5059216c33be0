"""The ElemMul factor: attention applied twice, without forming A A^T."""
