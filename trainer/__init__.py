"""Batches to weights: packing, losses, the DeepSpeed engine and the training loops."""
