"""torch_npu without an NPU: the functions of a Mixture-of-Experts layer for Ascend, on any device of torch."""
