"""The two-phase aclnn interface on torch tensors and NumPy arrays."""
