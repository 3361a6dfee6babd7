"""The training step of any rank of any layout, run in one process on tensors without memory."""
